"""The state in memory: how it is built, handed over and compared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from raytrain.checkpoint.store import CheckpointStore
from raytrain.errors import ConfigError, ResumeError, TaskError
from raytrain.events.kinds import StateRestored
from raytrain.events.messages import describe
from raytrain.rendezvous.state import NO_STATE
from raytrain.rundir import CHECKPOINTS, RunDir
from raytrain.worker import state as module
from raytrain.worker.handover import digest_of
from raytrain.worker.state import restore_newest
from tests.unit.worker.stubs import built, trained
from tests.unit.worker.tasks import Slope


def test_the_initial_state_depends_on_the_seed_alone() -> None:
    assert digest_of(built()) == digest_of(built())
    assert digest_of(built()) != digest_of(built(seed=6))
    assert built().step == NO_STATE


def test_r7_a_fall_back_says_which_newer_checkpoint_was_damaged_and_how(tmp_path: Path) -> None:
    store, directory = CheckpointStore(RunDir.at(str(tmp_path), "run")), tmp_path / "run" / CHECKPOINTS
    for steps in (1, 2, 3):
        store.write(steps, trained(steps).snapshot().files(), {}, {})
    data = bytearray((directory / "step-000000002/state.pt").read_bytes())
    data[-9] ^= 1
    (directory / "step-000000002/state.pt").write_bytes(data)
    os.truncate(directory / "step-000000003/state.pt", 10)
    (directory / "step-000000004").mkdir()  # of a save that was killed: nothing was lost
    state = built()
    restored = restore_newest(state, store, "min:valid/loss")
    assert (state.step, digest_of(state)) == (1, digest_of(trained(1)))
    size = len(trained(3).snapshot().files()["state.pt"])
    assert restored.damaged == {
        "step-000000003": f"state.pt is 10 bytes, the manifest says {size} bytes",
        "step-000000002": "state.pt is damaged: its SHA-256 differs from the manifest's",
    }
    assert describe(restored) == (
        f"resumed from step 1 (step-000000001); step-000000003 cannot be used: state.pt is 10 bytes, the manifest says "
        f"{size} bytes; step-000000002 cannot be used: state.pt is damaged: its SHA-256 differs from the manifest's"
    )
    assert restore_newest(state, CheckpointStore(RunDir.at(str(tmp_path), "new")), "") == StateRestored(
        step=0, checkpoint=""
    )
    (directory / "step-000000001/manifest.json").write_text("{")
    with pytest.raises(ResumeError, match=r"step-000000003: [^$]*step-000000002: .*SHA-256[^$]*step-000000001: .*not JSON"):
        restore_newest(state, store, "min:valid/loss")


def failing(model: nn.Module) -> Any:
    raise ValueError("no such layer")


@pytest.mark.parametrize(
    ("hook", "change", "error", "text"),
    [
        pytest.param(
            "model", lambda model: model.requires_grad_(False), ConfigError, "no parameter that is trained", id="r14"
        ),
        ("model", lambda model: None, TaskError, "model returned NoneType; it returns a torch.nn.modules.module.Module"),
        (
            "optimizer",
            lambda made: None,
            TaskError,
            "optimizer returned NoneType; it returns a torch.optim.optimizer.Optimizer",
        ),
        ("model", failing, TaskError, "ValueError: no such layer\nraised by model"),
    ],
)
def test_r14_a_hook_that_fails_or_returns_nothing_to_train_is_named(
    hook: str, change: Any, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Slope()
    of_task = getattr(task, hook)
    monkeypatch.setattr(Slope, hook, lambda self, *given: change(of_task(*given)))
    with pytest.raises(error) as caught:
        built(task)
    assert text in str(caught.value)
    assert error is TaskError or "Slope.model" in str(caught.value)
    assert module.__file__ not in str(caught.value)
