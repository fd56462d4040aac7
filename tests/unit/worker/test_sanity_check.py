"""What would fail long after the start is found before the first step, and the state is as it was."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import raytrain
from raytrain.errors import ConfigError, TaskError
from raytrain.worker.handover import digest_of
from raytrain.worker.sanity_check import sanity_check
from raytrain.worker.state import TrainState, build_state
from raytrain.worker.step import warm_up
from tests.support.tasks import Regression, WithBatchNorm, WithDropout
from tests.unit.worker.stubs import CPU, context_of, spec_of


def checked(kind: type[Regression], **settings: Any) -> TrainState:
    spec = spec_of(kind(), **{"steps": 10} | settings)
    state = build_state(spec, CPU)
    sanity_check(context_of(spec), state)
    return state


class KeepsAFunction(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor = lambda step: 0.5**step
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]


class Forgets(torch.optim.lr_scheduler.ExponentialLR):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_epoch = -7


class Fails(torch.optim.lr_scheduler.ExponentialLR):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("gamma")


class OddDtype(nn.Linear):
    def __init__(self) -> None:
        super().__init__(12, 1)
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))


@pytest.mark.parametrize(
    ("hook", "made", "error", "text"),
    [
        (
            "scheduler",
            lambda o, n: KeepsAFunction(o),
            ConfigError,
            "scheduler.factor is a builtins.function.*out of state_dict",
        ),
        (
            "scheduler",
            lambda o, n: Forgets(o, 0.5),
            ConfigError,
            "scheduler.last_epoch has another value after it was saved",
        ),
        ("scheduler", lambda o, n: Fails(o, 0.5), TaskError, "KeyError: 'gamma'\nraised by load_state_dict"),
        (
            "model",
            OddDtype,
            ConfigError,
            "phase has the dtype torch.complex128, which safetensors does not support",
        ),
    ],
)
def test_r9_what_cannot_be_saved_or_loaded_is_named_before_the_first_step(
    hook: str, made: Any, error: Any, text: str
) -> None:
    kind = type("Mine", (Regression,), {hook: lambda self, *given: made(*given)})
    with pytest.raises(error, match=f"(?s){text}"):
        checked(kind)


def by_tokens(self: Any, model: nn.Module, batch: Any) -> torch.Tensor:
    """As a cross entropy with `ignore_index` is averaged."""
    each = (model(batch["x"]) - batch["y"])[:, 0].pow(2)
    return (each * batch["length"]).sum() / batch["length"].sum()


def without_valid(self: Any) -> dict[str, Any]:
    return {"train": Regression.data(self)["train"]}


@pytest.mark.parametrize("micro_batch", [None, 1])
@pytest.mark.parametrize(
    ("hooks", "text"),
    [
        ({"loss": by_tokens}, r"Mine.loss.*\n.*as the mean over .* parts.*\n.*raytrain.Loss\(sum, weight\)"),
        ({"loss": by_tokens, "data": without_valid}, "Mine.loss"),
        ({"metrics": lambda self, model, batch: {"m": batch["y"].square().mean().exp()}}, "Mine.metrics, m.*summarise"),
    ],
)
def test_r4_r5_scalars_that_are_not_means_are_refused(hooks: Any, text: str, micro_batch: int | None) -> None:
    with pytest.raises(ConfigError, match=f"(?s){text}"):
        checked(type("Mine", (Regression,), hooks), micro_batch=micro_batch)


class InTrainingOnly(Regression):
    """As some detection models, which return losses only in training."""

    data = without_valid

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert model.training
        return super().loss(model, batch)


class NeedsAllRows(Regression):
    """Cannot be computed from few rows."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"rows": raytrain.Sum(len(batch["x"]))}

    def summarise(self, sums: Any) -> dict[str, Any]:
        return {"ratio": 1 / max(0, int(sums["rows"]) - 30)}


@pytest.mark.parametrize("kind", [InTrainingOnly, NeedsAllRows, WithDropout, WithBatchNorm])
def test_what_can_be_evaluated_and_saved_is_taken_and_leaves_no_trace(kind: Any) -> None:
    task = kind()
    state = checked(kind)
    spec = spec_of(task, steps=10)
    other = build_state(spec, CPU)
    assert digest_of(state) == digest_of(other)
    assert state.optimizer.state_dict() == other.optimizer.state_dict()
    assert all(module.training for module in state.model.modules())
    assert all(parameter.grad is None for parameter in state.model.parameters())
    frozen = copy.deepcopy(other.model).eval()
    other.model[0].eval()  # type: ignore[operator,index]
    sanity_check(context_of(spec), other)
    assert not other.model[0].training  # type: ignore[union-attr,index]
    assert other.model[1].training  # type: ignore[union-attr,index]
    assert not any(module.training for module in frozen.modules())


def by_itself(self: Any, model: nn.Module, batch: Any) -> torch.Tensor:
    loss = Regression.loss(self, model, batch).mean()
    loss.backward()
    return loss.detach()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (by_itself, r"called backward\(\) itself\n.*\n.*return the loss, and call neither"),
        (lambda self, model, batch: Regression.loss(self, model, batch).detach(), "depends on no parameter that is trained"),
    ],
)
def test_manual_optimization_is_refused_before_the_first_step(loss: Any, text: str) -> None:
    spec = spec_of(type("Mine", (Regression,), {"loss": loss})())
    with pytest.raises(ConfigError, match=f"Mine.loss\n.*{text}"):
        warm_up(spec, build_state(spec, CPU), CPU)


class Plateau(Regression):
    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        return {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "val_loss"}


@pytest.mark.parametrize(
    ("kind", "best", "text"),
    [
        (Regression, "max:valid/mea", "run.best\n.*valid/mea\n.*valid/loss, valid/mae\n.*did you mean valid/mae"),
        (Plateau, "min:valid/loss", "scheduler\n.*val_loss\n.*\n.*did you mean valid/loss"),
    ],
)
def test_r8_a_metric_that_is_not_evaluated_decides_nothing(kind: Any, best: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        checked(kind, best=best)
    checked(Regression, best="min:valid/mae")
    checked(Regression, best="min:valid/ema/mae", ema_decay=0.9)
    assert math.isfinite(build_state(spec_of(Regression()), CPU).learning_rate)
