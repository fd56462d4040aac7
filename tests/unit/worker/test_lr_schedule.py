"""Learning rate schedules per step, per epoch and per evaluation, and what is refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as kinds

from raytrain.config import RunConfig
from raytrain.errors import ConfigError
from raytrain.worker.lr_schedule import LRSchedule, build_lr_schedule

PER_EPOCH = 5


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0)


def built(returned: Any, optimizer: torch.optim.Optimizer, names: Any = ("valid",), **settings: Any) -> LRSchedule:
    schedule = build_lr_schedule("Mine.scheduler", returned, optimizer, RunConfig(**settings), PER_EPOCH, list(names))
    assert schedule is not None
    return schedule


def rates(schedule: LRSchedule, optimizer: torch.optim.Optimizer, num_steps: int, skipped: int = -1) -> list[float]:
    """The learning rate of each step; step `skipped` is not applied."""
    found = []
    for step in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.finish_step(step + 1, applied=step != skipped)
    return found


@pytest.mark.parametrize(
    ("more", "exponents"),
    [
        (None, [0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ({"interval": "step"}, [0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ({"interval": "step", "frequency": 4}, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]),
        ({"interval": "epoch", "name": "lr"}, [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]),
        ({}, [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]),
        ({"frequency": 2}, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]),
    ],
)
def test_r3_a_schedule_advances_per_step_or_epoch_and_a_skipped_step_is_none(more: Any, exponents: list[int]) -> None:
    optimizer = sgd()
    scheduler = kinds.ExponentialLR(optimizer, 0.5)
    schedule = built(scheduler if more is None else {"scheduler": scheduler, **more}, optimizer)
    assert rates(schedule, optimizer, 12, skipped=2) == [0.5**exponent for exponent in exponents]


def test_a_plateau_schedule_is_stepped_once_per_evaluation_also_after_a_resume() -> None:
    losses = [0.9, 0.5, 0.6, 0.7, 0.6, 0.4]
    plain = sgd()
    by_hand, expected = kinds.ReduceLROnPlateau(plain, factor=0.5, patience=1), []
    optimizer = sgd()
    schedule = built(kinds.ReduceLROnPlateau(optimizer, factor=0.5, patience=1), optimizer)
    for number, loss in enumerate(losses):
        step = PER_EPOCH * (number + 1)
        by_hand.step(loss)
        expected.append(plain.param_groups[0]["lr"])
        before = (optimizer.state_dict(), schedule.scheduler.state_dict())
        for _ in range(2):  # as after a new generation at this step
            schedule.finish_evaluation(step, {"valid/loss": loss})
            schedule.finish_step(step, applied=True)
        assert optimizer.param_groups[0]["lr"] == expected[-1]
        optimizer = sgd()  # a resume from a checkpoint that was saved before the evaluation
        schedule = built(kinds.ReduceLROnPlateau(optimizer, factor=0.5, patience=1), optimizer)
        optimizer.load_state_dict(before[0])
        schedule.scheduler.load_state_dict(before[1])
        schedule.finish_evaluation(step, {"valid/loss": loss})
        assert optimizer.param_groups[0]["lr"] == expected[-1]
    assert expected == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one_cycle": lambda o: kinds.OneCycleLR(o, max_lr=0.2, total_steps=20),
    "cosine": lambda o: kinds.CosineAnnealingLR(o, T_max=20),
    "sequential": lambda o: kinds.SequentialLR(
        o, [kinds.LinearLR(o, 0.1, total_iters=4), kinds.CosineAnnealingLR(o, 16)], milestones=[4]
    ),
    "chained": lambda o: kinds.ChainedScheduler([kinds.ConstantLR(o, 0.5, 6), kinds.ExponentialLR(o, 0.9)]),
}


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_r15_the_schedule_of_a_clone_is_moved_to_where_it_would_be(name: str, interval: str) -> None:
    own, clone = sgd(), sgd()
    straight = built({"scheduler": SCHEDULERS[name](own), "interval": interval}, own)
    moved = built({"scheduler": SCHEDULERS[name](clone), "interval": interval}, clone)
    rates(straight, own, 12)
    moved.advance_to(12)
    assert rates(moved, clone, 6) == rates(straight, own, 6)


class Timm:
    """A scheduler that wants to know the epoch."""

    def step(self, epoch: int) -> None:
        raise AssertionError

    def state_dict(self) -> dict[str, Any]:
        return {}

    load_state_dict = state_dict


PLATEAU = kinds.ReduceLROnPlateau


@pytest.mark.parametrize(
    ("returned", "settings", "text"),
    [
        (lambda o: [kinds.ExponentialLR(o, 0.5)] * 2, {}, "a list of 2 schedulers.*SequentialLR and ChainedScheduler"),
        (lambda o: {"scheduler": kinds.ExponentialLR(o, 0.5), "intervall": "step"}, {}, "did you mean 'interval'"),
        (lambda o: {"scheduler": kinds.ExponentialLR(o, 0.5), "interval": "day"}, {}, "interval 'day'"),
        (lambda o: {"scheduler": kinds.ExponentialLR(o, 0.5), "frequency": 0}, {}, "frequency 0"),
        (lambda o: kinds.ExponentialLR(sgd(), 0.5), {}, "an ExponentialLR of another optimizer|a ExponentialLR of another"),
        (lambda o: Timm(), {}, r"a Timm, whose step\(\) needs epoch"),
        (lambda o: 0.1, {}, r"a float, which has no step\(\)"),
        (PLATEAU, {"names": ()}, "stepped after each evaluation.*another source besides train"),
        (PLATEAU, {"best": "max:valid/accuracy"}, "mode 'min'.*max:valid/accuracy.*set its mode to 'max'"),
        (lambda o: {"scheduler": PLATEAU(o), "interval": "step"}, {}, "interval 'step'.*set run.eval_every"),
    ],
)
def test_what_cannot_be_stepped_is_refused_with_what_to_return(returned: Any, settings: Any, text: str) -> None:
    optimizer = sgd()
    with pytest.raises(ConfigError, match=f"(?s)^Mine.scheduler.*{text}"):
        built(returned(optimizer), optimizer, **settings)
