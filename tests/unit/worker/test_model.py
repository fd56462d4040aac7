"""What is refused, prepared or told about a model and its optimizer before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raytrain.errors import ConfigError, ResumeError
from raytrain.worker.state import build_state
from raytrain.worker.step import warm_up
from tests.support.models import FrozenNorm, HeadOnly, Hooked, Sparse, Tied, Unfreezing, net
from tests.support.tasks import Regression
from tests.unit.worker.stubs import CPU, spec_of


class Synchronized(Regression):
    def model(self) -> nn.Module:
        return net(nn.SyncBatchNorm(24))


class HalfLazy(Regression):
    def model(self) -> nn.Module:
        model = net()
        model.extra = nn.LazyLinear(3)
        model.forward = lambda x: model[2](model[1](model[0](x)))
        return model


class LearnedWeight(Regression):
    """Trains a parameter that the model does not have."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "SyncBatchNorm": (Synchronized(), {}, r"Synchronized.model, module 1\n.*SyncBatchNorm[\s\S]*use BatchNorm"),
    "lazy modules that no pass reaches": (HalfLazy(), {}, r"model, extra.weight[\s\S]*in model\(\)"),
    "parameters outside of the model": (LearnedWeight(), {}, r"shape \[3\][\s\S]*module that model\(\) returns"),
    "sparse gradients that are clipped": (Sparse(), {"clip_norm": 1.0}, r"run.clip_norm[\s\S]*words.weight is sparse"),
    "sparse gradients, bitwise": (Sparse(), {"exactness": "bitwise"}, r"run.exactness[\s\S]*sparse=False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_the_same_for_any_workers_is_refused_before_the_first_step(case: str) -> None:
    task, settings, message = REFUSED[case]
    spec = spec_of(task, **settings)
    with pytest.raises(ConfigError, match=message):
        warm_up(spec, build_state(spec, CPU), CPU)


@pytest.mark.parametrize(
    ("task", "note"),
    [(HeadOnly(), "does not have 0.weight, 0.bias, which have gradients"), (FrozenNorm(), "left 1 in eval mode")],
)
def test_what_may_be_a_mistake_is_told_at_the_start(task: Any, note: str) -> None:
    (told,) = build_state(spec_of(task), CPU).notes
    assert note in told
    assert build_state(spec_of(Regression()), CPU).notes == []


class Pretrained(Regression):
    """A model that is in eval mode as a whole, as `from_pretrained` returns it."""

    def model(self) -> nn.Module:
        return net(nn.Dropout(0.1)).eval()


def test_a_model_in_eval_mode_as_a_whole_is_trained_in_train_mode() -> None:
    state = build_state(spec_of(Pretrained()), CPU)
    state.set_train_mode()
    assert state.model[1].training


class Compiled(Hooked):
    """Compiled by the user, as a whole or in part."""

    whole: bool = True

    def model(self) -> nn.Module:
        model = net()
        if not self.whole:
            model[0] = torch.compile(model[0], backend="eager")
            return model
        return torch.compile(model, backend="eager")  # type: ignore[return-value]


@pytest.mark.parametrize("whole", [True, False])
def test_keys_never_carry_the_names_of_wrappers_and_load_into_either(whole: bool) -> None:
    wrapped, bare = build_state(spec_of(Compiled(whole=whole), ema_decay=0.5), CPU), build_state(spec_of(Hooked()), CPU)
    with torch.no_grad():
        wrapped.model.get_parameter(next(iter(dict(wrapped.model.named_parameters())))).fill_(7.0)
    wrapped.step = 3
    taken = wrapped.snapshot()
    assert list(taken.model) == list(taken.ema) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    bare.load_live(wrapped.live())
    assert bare.model.get_parameter("0.weight").unique().tolist() == [7.0]
    wrapped.load_checkpoint(taken.files())
    assert wrapped.step == 3


def test_averaged_weights_are_applied_for_a_while_and_saved_beside_the_weights() -> None:
    state = build_state(spec_of(Tied(), ema_decay=0.75), CPU)
    ema, model = state.ema, state.model
    assert ema is not None
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 4.0
    ema.update()
    with ema.applied():
        torch.testing.assert_close(dict(model.state_dict()), {name: value + 1.0 for name, value in start.items()})
    torch.testing.assert_close(dict(model.state_dict()), {name: value + 4.0 for name, value in start.items()})
    assert torch.equal(ema.values()["0.weight"], ema.values()["2.weight"]), "tied weights stay tied"


def test_a_resume_keeps_what_hooks_have_frozen_and_refuses_an_edited_model() -> None:
    spec = spec_of(Unfreezing())
    state, resumed, edited = (build_state(spec, CPU) for _ in range(3))
    for _ in range(3):
        state.model.after_step()
    state.step = 3
    resumed.load_checkpoint(state.snapshot().files())
    assert [p.requires_grad for p in resumed.model.parameters()] == [p.requires_grad for p in state.model.parameters()]
    edited.model.net[2].requires_grad_(False)
    edited.__post_init__()
    with pytest.raises(ResumeError, match=r"frozen or unfrozen: net\.2\.bias"):
        edited.load_checkpoint(state.snapshot().files())


def test_averaging_that_was_switched_on_for_a_resume_is_refused() -> None:
    state, averaging = build_state(spec_of(Regression()), CPU), build_state(spec_of(Regression(), ema_decay=0.9), CPU)
    state.step = 1
    with pytest.raises(ResumeError, match=r"run\.ema_decay"):
        averaging.load_checkpoint(state.snapshot().files())
