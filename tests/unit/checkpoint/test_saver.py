"""Saving in the background: events, stalls, retention, and storage failures."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from raytrain.checkpoint.saver import Saver
from raytrain.checkpoint.state import Snapshot, snapshot
from raytrain.checkpoint.store import CheckpointStore
from raytrain.errors import CheckpointError, UnsavableError
from raytrain.events.kinds import CheckpointFailed, CheckpointSaved, Event
from tests.unit.checkpoint.faults import FirstFail, Hang, KillAt, Killed, store_at


def take(step: int) -> Snapshot:
    model = nn.Linear(2, 1)
    return snapshot(model, torch.optim.SGD(model.parameters(), lr=0.1), None, step)


class Scene:
    """A saver with its events, on a filesystem with a hook."""

    def __init__(self, path: Path, before: Callable[[str, str], None] = lambda *_: None, **limits: float) -> None:
        self.events: list[Event] = []
        self.store = store_at(path, before)
        self.saver = Saver(self.store, 2, 1, "min:valid/loss", self.events.append, **limits)

    def save(self, *steps: int, score: float = 0.5) -> None:
        for step in steps:
            self.saver.save(take(step), {"valid/loss": score}, {"global_batch": 64})
        assert self.saver.wait(30)

    def steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in self.store.list()]

    def failures(self) -> list[tuple[int, str]]:
        return [(event.step, event.reason) for event in self.events if isinstance(event, CheckpointFailed)]


@pytest.mark.parametrize("fails", [False, True])
def test_the_memory_of_a_snapshot_is_released_once_it_is_written_or_has_failed(tmp_path: Path, fails: bool) -> None:
    gate, released = Gate(), threading.Event()
    scene = Scene(tmp_path, gate)
    given = replace(take(1), release=released.set)
    if fails:
        given.rest["extra"]["odd"] = object()
    scene.saver.save(given, {}, {})
    if not fails:
        assert gate.reached.wait(30)
        assert not released.is_set()
    gate.opened.set()
    assert scene.saver.wait(30)
    assert released.is_set()
    assert bool(scene.failures()) is fails


class Gate:
    """Blocks the first write until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, operation: str, path: str) -> None:
        if operation == "write":
            self.reached.set()
            if not self.opened.wait(30):
                raise TimeoutError("the gate was not opened")


def test_a_snapshot_is_written_and_reported(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.save(5)
    ((event,), (checkpoint,)) = scene.events, scene.store.list()
    assert isinstance(event, CheckpointSaved)
    assert (event.step, event.checkpoint, event.size_bytes) == (5, checkpoint.name, checkpoint.manifest.size_bytes)
    assert min(event.seconds, event.stall_s) > 0
    assert (checkpoint.manifest.metrics, checkpoint.manifest.run) == ({"valid/loss": 0.5}, {"global_batch": 64})
    assert (scene.saver.idle, scene.saver.newest_step, scene.saver.close(30)) == (True, 5, True)


@pytest.mark.parametrize("operation", ["open_output_stream", "write"])
def test_r6_a_storage_that_never_answers_fails_the_save_and_not_the_next_one(tmp_path: Path, operation: str) -> None:
    hang, scene = Hang(operation, "state.pt"), Scene(tmp_path)
    scene.store = CheckpointStore(hang.run_dir(tmp_path))
    scene.saver = Saver(scene.store, 2, 1, "min:valid/loss", scene.events.append)
    scene.save(5)
    file = tmp_path / "checkpoints/step-000000005/state.pt"
    ((step, reason),) = scene.failures()
    assert (step, isinstance(scene.saver.last_error, CheckpointError)) == (5, True)
    assert f"could not be written: [Errno 110] the storage has not answered for 0.2 s: {operation} of {file}" in reason
    scene.save(6)
    assert (scene.steps(), scene.saver.last_error, scene.saver.close(30)) == ([6], None, True)
    hang.over.set()


def test_training_continues_during_a_save_and_a_second_save_waits(tmp_path: Path) -> None:
    gate = Gate()
    scene = Scene(tmp_path, gate)
    scene.saver.save(take(1), {}, {})
    assert gate.reached.wait(30)
    assert not scene.saver.idle
    assert not scene.saver.wait(0)
    second = take(2)
    threading.Timer(0.2, gate.opened.set).start()
    scene.saver.save(second, {}, {})
    assert gate.opened.is_set()
    assert scene.saver.close(30)
    stalls = {event.step: event.stall_s for event in scene.events if isinstance(event, CheckpointSaved)}
    assert list(stalls) == [1, 2]
    assert stalls[2] >= 0.1 + second.seconds


def test_r6_a_hanging_storage_blocks_training_no_longer_than_the_limit(tmp_path: Path) -> None:
    gate = Gate()
    scene = Scene(tmp_path, gate, max_stall_s=0.01)
    scene.saver.save(take(1), {}, {})
    assert gate.reached.wait(30)
    scene.saver.save(take(2), {}, {})
    ((step, reason),) = scene.failures()
    assert (step, "still being written" in reason) == (2, True)
    assert isinstance(scene.saver.last_error, CheckpointError)
    assert not scene.saver.close(0.01)
    gate.opened.set()
    assert scene.saver.wait(30)
    assert scene.steps() == [1]


def test_r7_a_failed_save_is_reported_and_the_next_one_clears_it(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    scene = Scene(tmp_path, FirstFail("write", times=3, error=full))
    scene.save(1)
    ((step, reason),) = scene.failures()
    assert (step, "No space left on device" in reason, scene.steps()) == (1, True, [])
    assert isinstance(scene.saver.last_error, CheckpointError)
    scene.save(2)
    assert (scene.saver.last_error, scene.steps()) == (None, [2])


def test_r16_a_failure_that_repeats_is_told_less_and_less_often(tmp_path: Path) -> None:
    scene = Scene(tmp_path, FirstFail("write", times=1000))
    for step in range(1, 40):
        scene.saver.save(take(step), {}, {})
        assert scene.saver.wait(30)
    assert [step for step, _ in scene.failures()] == [1, 2, 4, 8, 16, 32]
    assert scene.failures()[-1][1].endswith("(32 times)")
    assert scene.saver.can_retry


def test_r7_a_state_that_cannot_be_saved_is_not_worth_another_attempt(tmp_path: Path) -> None:
    scene, snapshot = Scene(tmp_path), take(1)
    snapshot.rest["scheduler"] = {"factor": print}
    scene.saver.save(snapshot, {}, {})
    assert scene.saver.wait(30)
    assert isinstance(scene.saver.last_error, UnsavableError)
    assert not scene.saver.can_retry
    scene.save(2)
    assert (scene.saver.last_error, scene.saver.can_retry) == (None, False)


def test_r8_metrics_that_are_known_later_count_for_the_best_and_survive(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for step, score in enumerate([0.9, 0.1, 0.5, 0.4, 0.3], start=1):
        scene.saver.save(take(step), {}, {"seed": 1})
        scene.saver.set_metrics(step, {"valid/loss": score})
        scene.saver.set_metrics(step, {"valid/loss": -1.0})
    assert scene.saver.wait(30)
    assert scene.steps() == [2, 4, 5]
    found = scene.store.list()
    assert [checkpoint.manifest.metrics for checkpoint in found] == [{"valid/loss": score} for score in (0.1, 0.4, 0.3)]
    assert found[0].manifest.run == {"seed": 1}
    newest = scene.store.newest_verified()
    assert newest is not None
    assert newest.step == 5
    scene.saver.set_metrics(99, {"valid/loss": 0.0})
    assert (scene.saver.wait(30), scene.failures()) == (True, [])


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError()])
def test_r6_an_unexpected_error_is_reported(tmp_path: Path, error: Exception) -> None:
    def broken(operation: str, path: str) -> None:
        raise error

    scene = Scene(tmp_path, broken)
    scene.save(1)
    assert scene.saver.last_error is error
    assert scene.failures() == [(1, str(error) or "MemoryError")]


def test_r8_the_newest_the_best_and_the_pinned_stay(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for step, score in enumerate([0.9, 0.1, float("nan"), 0.5, 0.4, 0.3], start=1):
        scene.save(step, score=score)
    assert scene.steps() == [2, 5, 6]
    scene.store.pin(["step-000000005"])
    scene.save(7, 8)
    assert scene.steps() == [2, 5, 7, 8]
    scene.store.pin([])
    scene.save(9)
    assert scene.steps() == [2, 8, 9]
    (tmp_path / "pins.json").write_bytes(b"\xff[")
    scene.save(10)
    assert (scene.steps(), scene.failures(), scene.saver.last_error) == ([2, 9, 10], [], None)


@pytest.mark.parametrize("fault", [FirstFail("open_input_stream", 12, "pins.json"), FirstFail("delete_file", 3)])
def test_r8_failed_retention_is_reported_and_the_save_is_valid(tmp_path: Path, fault: FirstFail) -> None:
    scene = Scene(tmp_path, fault)
    scene.save(1, score=0.1)
    scene.save(2, 3, 4)
    assert (scene.steps(), scene.saver.last_error, fault.left) == ([1, 2, 3, 4], None, 0)
    assert scene.failures()
    assert all("old checkpoints could not be deleted" in reason for _, reason in scene.failures())
    scene.save(5)
    assert scene.steps() == [1, 4, 5]


def test_r7_the_next_save_deletes_what_killed_and_failed_saves_left(tmp_path: Path) -> None:
    is_broken = True

    def broken(operation: str, path: str) -> None:
        if is_broken and (operation == "delete_dir" or (operation == "write" and path.endswith("state.pt"))):
            raise OSError(errno.EROFS, "Read-only file system")

    with contextlib.suppress(Killed):
        store_at(tmp_path, KillAt(3)).write(1, {"model.safetensors": b"weights"}, {}, {})
    scene = Scene(tmp_path, broken)
    scene.save(2)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-000000001", "step-000000002"]
    is_broken = False
    scene.save(3)
    assert [step for step, _ in scene.failures()] == [2]
    assert os.listdir(tmp_path / "checkpoints") == ["step-000000003"]


def test_r8_a_new_checkpoint_stays_though_a_damaged_one_has_a_later_step(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for step in (7, 8, 9):
        scene.store.write(step, {"state.pt": b"good"}, {}, {})
    for step in (8, 9):
        (tmp_path / f"checkpoints/step-{step:09d}/state.pt").write_bytes(b"evil")
    scene.saver.save(take(7), {}, {})
    assert scene.saver.wait(30)
    newest = scene.store.newest_verified()
    assert newest is not None
    assert newest.name == "step-000000007-2"
