"""A state under other settings: what was gathered is the saved one, rates and schedule are the live ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raytrain.checkpoint.state import restore, snapshot
from raytrain.errors import ResumeError


def trained(lr: float, momentum: float, num_steps: int, steps_to_do: int = 0) -> tuple[nn.Module, torch.optim.SGD, object]:
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    for _ in range(steps_to_do):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def test_r15_a_clone_keeps_its_own_rates_on_its_own_schedule_and_takes_the_others_weights_and_momentum() -> None:
    theirs = trained(0.1, 0.9, 40, steps_to_do=10)
    files = snapshot(*theirs, 10, []).files()
    model, optimizer, scheduler = trained(0.3, 0.5, 40)
    restored = restore(files, model, optimizer, scheduler, keeps_settings=True)
    assert restored.step == 10
    torch.testing.assert_close(model.state_dict(), theirs[0].state_dict())
    for mine, other in zip(model.parameters(), theirs[0].parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[mine]["momentum_buffer"], theirs[1].state[other]["momentum_buffer"])
    _, expected, _ = trained(0.3, 0.5, 40, steps_to_do=10)
    assert optimizer.param_groups[0]["lr"] == expected.param_groups[0]["lr"]
    assert (optimizer.param_groups[0]["momentum"], scheduler.last_epoch) == (0.5, 10)


def test_without_that_the_saved_rates_go_on() -> None:
    files = snapshot(*trained(0.1, 0.9, 40, steps_to_do=10), 10, []).files()
    model, optimizer, scheduler = trained(0.3, 0.5, 40)
    restore(files, model, optimizer, scheduler)
    _, expected, _ = trained(0.1, 0.9, 40, steps_to_do=10)
    assert optimizer.param_groups[0]["lr"] == expected.param_groups[0]["lr"]


Schedule = Callable[[torch.optim.Optimizer], Any]
SCHEDULES: dict[str, Schedule] = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4),
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=40),
    "warm-up, then cosine": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 35),
        ],
        [5],
    ),
}


def in_two_groups(lr: float, schedule: Schedule, num_steps: int = 0) -> tuple[nn.Module, torch.optim.Adam, Any]:
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": lr / 10}]
    optimizer = torch.optim.Adam(groups, lr=lr)
    scheduler = schedule(optimizer)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_rates_of_each_group_are_then_and_later_those_of_ones_own_schedule_after_as_many_steps(kind: str) -> None:
    schedule = SCHEDULES[kind]
    files = snapshot(*in_two_groups(0.1, schedule, 10), 10, []).files()
    model, optimizer, scheduler = in_two_groups(0.3, schedule)
    restore(files, model, optimizer, scheduler, keeps_settings=True)
    _, expected, own = in_two_groups(0.3, schedule, 10)
    for _ in range(8):
        settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        assert settings == [
            {name: value for name, value in group.items() if name != "params"} for group in expected.param_groups
        ]
        optimizer.step(), scheduler.step(), expected.step(), own.step()
    assert scheduler.last_epoch == 18


def test_moments_and_their_number_of_steps_are_the_saved_ones() -> None:
    theirs = in_two_groups(0.1, SCHEDULES["step"], 10)
    model, optimizer, scheduler = in_two_groups(0.3, SCHEDULES["step"])
    restore(snapshot(*theirs, 10, []).files(), model, optimizer, scheduler, keeps_settings=True)
    for mine, other in zip(model.parameters(), theirs[0].parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(optimizer.state[mine][name], theirs[1].state[other][name])


def test_without_a_schedule_the_rate_is_ones_own() -> None:
    theirs, mine = trained(0.1, 0.9, 40, steps_to_do=3), trained(0.3, 0.5, 40)
    restored = restore(snapshot(*theirs[:2], None, 3, []).files(), *mine[:2], None, keeps_settings=True)
    assert (restored.step, mine[1].param_groups[0]["lr"]) == (3, 0.3)


def test_r10_other_parameter_groups_are_refused_here_too() -> None:
    files = snapshot(*in_two_groups(0.1, SCHEDULES["step"], 2)[:2], None, 2, []).files()
    model = nn.Linear(3, 1)
    with pytest.raises(ResumeError, match="parameter groups"):
        restore(files, model, torch.optim.Adam(model.parameters()), None, keeps_settings=True)
