"""The state in memory: how it is built, handed over and compared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raytrain.checkpoint.store import CheckpointStore
from raytrain.errors import ConfigError, ResumeError, TaskError
from raytrain.events.kinds import StateRestored
from raytrain.events.messages import describe
from raytrain.rendezvous.state import NO_STATE
from raytrain.rundir import CHECKPOINTS, RunDir
from raytrain.worker import state as module
from raytrain.worker.group import Group, PeerLost
from raytrain.worker.state import (
    EvaluationState,
    StateMismatch,
    TrainState,
    broadcast_state,
    build_state,
    checksum,
    restore_newest,
)
from tests.support.tasks import WithDropout
from tests.unit.worker.stubs import CPU, spec_of
from tests.unit.worker.tasks import Slope


def built(task: Any = None, seed: int = 5) -> TrainState:
    return build_state(spec_of(task or WithDropout(), seed=seed, steps=10), CPU)


def trained(steps: int) -> TrainState:
    state = built()
    for _ in range(steps):
        state.optimizer.zero_grad()
        state.model(torch.ones(4, 12)).sum().backward()
        state.optimizer.step()
        state.scheduler.step()  # type: ignore[union-attr]
    state.step = steps
    return state


class Follower(Group):
    """A follower of a group of two, whose leader has the values that the test gives.

    Args:
        shared: what the leader shares, one after the other.
        theirs: what the leader adds to each gathering, one after the other.
    """

    def __init__(self, shared: list[Any], theirs: list[Any]) -> None:
        self.rank, self.size, self.device = 1, 2, CPU
        self._shared, self._theirs = shared, theirs

    def broadcast_object(self, value: Any) -> Any:
        return self._shared.pop(0)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [self._theirs.pop(0), value]


def test_the_initial_state_depends_on_the_seed_alone() -> None:
    assert checksum(built()) == checksum(built())
    assert checksum(built()) != checksum(built(seed=6))
    assert built().step == NO_STATE


def test_checksums_differ_if_weights_or_the_optimizer_differ() -> None:
    state, other = trained(2), trained(2)
    assert checksum(state) == checksum(other)
    with torch.no_grad():
        weight = next(other.model.parameters()).view(-1)
        weight[3] = torch.nextafter(weight[3], torch.tensor(9.0))
    assert checksum(state) != checksum(other)
    third = trained(2)
    next(iter(third.optimizer.state.values()))["exp_avg"].view(-1)[0] += 1e-6
    assert checksum(state) != checksum(third)


def test_the_checksum_covers_weights_of_every_type_and_shape() -> None:
    model = nn.Linear(3, 1).bfloat16()
    model.register_buffer("mask", torch.ones(5, dtype=torch.bool))
    model.register_buffer("count", torch.tensor(3))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    before = checksum(state)
    model.mask[4] = False
    assert checksum(state) != before


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
    assert (state.step, checksum(state)) == (1, checksum(trained(1)))
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


def test_nothing_is_sent_if_all_ranks_are_equal() -> None:
    state, best = trained(3), EvaluationState(3, 0.25, 3, {"valid/loss": 0.25})
    broadcast_state(state, Follower([best], [(3, checksum(state))]))
    assert state.evaluation == best


@pytest.mark.parametrize("newcomer", ["new", "with other last bits"])
def test_who_differs_takes_all_of_the_leaders_state(newcomer: str) -> None:
    leader, mine = trained(3), built(seed=9) if newcomer == "new" else trained(3)
    with torch.no_grad():
        next(mine.model.parameters()).view(-1)[0] += 1e-7
    theirs = [(3, checksum(leader)), checksum(leader)]
    broadcast_state(mine, Follower([EvaluationState(2, 0.5), leader.snapshot().to_bytes()], theirs))
    assert (mine.step, mine.evaluation.best_score) == (3, 0.5)
    assert checksum(mine) == checksum(leader)
    assert mine.learning_rate == leader.learning_rate < 0.005


def test_a_worker_whose_state_differs_after_the_broadcast_is_refused() -> None:
    leader, newcomer = trained(3), built()
    with pytest.raises(StateMismatch, match="after the broadcast of step 3"):
        broadcast_state(newcomer, Follower([EvaluationState(), leader.snapshot().to_bytes()], [(3, (0, 0)), (0, 0)]))


def test_the_others_do_not_train_with_a_worker_whose_state_differs() -> None:
    class Three(Follower):
        def all_gather_object(self, value: Any) -> list[Any]:
            return [*super().all_gather_object(value), (0, 0)]

    leader, follower = trained(3), trained(3)
    theirs = [(3, checksum(leader)), checksum(leader)]
    with pytest.raises(PeerLost, match="another worker differs"):
        broadcast_state(follower, Three([EvaluationState(), leader.snapshot().to_bytes()], theirs))
    assert checksum(follower) == checksum(leader)


def test_a_loss_during_the_broadcast_leaves_the_state_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    newcomer = built()
    before = checksum(newcomer)
    with pytest.raises(IndexError):  # the leader is gone before its state has come
        broadcast_state(newcomer, Follower([EvaluationState(2, 0.5)], [(3, (0, 0))]))
    assert (newcomer.step, newcomer.evaluation, checksum(newcomer)) == (NO_STATE, EvaluationState(), before)


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
