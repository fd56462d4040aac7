"""Saving behind the training thread's back: events, stalls, retention, and stores that fail."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from raytrain.checkpoint.saver import Saver
from raytrain.checkpoint.state import Snapshot, restore, snapshot
from raytrain.errors import CheckpointError
from raytrain.events.kinds import CheckpointFailed, CheckpointSaved, Event
from tests.unit.checkpoint.faults import FirstFail, KillAt, Killed, store_at


def take(step: int) -> Snapshot:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, float(step))
    return snapshot(model, torch.optim.SGD(model.parameters(), lr=0.1), None, step)


class Scene:
    """A saver with its events, on a filesystem with a hook."""

    def __init__(self, path: Path, before: Callable[[str, str], None] | None = None, **limits: float) -> None:
        self.events: list[Event] = []
        self.store = store_at(path, before)
        self.saver = Saver(self.store, 2, 1, "min:valid/loss", self.events.append, **limits)

    def steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in self.store.list()]

    def failures(self) -> list[CheckpointFailed]:
        return [event for event in self.events if isinstance(event, CheckpointFailed)]


class Gate:
    """Holds the first write until it is opened, and tells when somebody stands before it."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, operation: str, path: str) -> None:
        if operation == "write":
            self.reached.set()
            if not self.opened.wait(30):
                raise TimeoutError("nobody opened the gate")


def test_a_snapshot_is_written_told_of_and_restored(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.saver.save(take(5), {"valid/loss": 0.5}, {"global_batch": 64})
    assert scene.saver.wait(30)
    assert scene.saver.idle
    (event,) = scene.events
    (checkpoint,) = scene.store.list()
    assert isinstance(event, CheckpointSaved)
    assert (event.step, event.checkpoint, event.size_bytes) == (5, checkpoint.name, checkpoint.manifest.size_bytes)
    assert event.seconds > 0
    assert event.stall_s > 0
    assert (checkpoint.manifest.metrics, checkpoint.manifest.run) == ({"valid/loss": 0.5}, {"global_batch": 64})
    model = nn.Linear(2, 1)
    files = {name: scene.store.read(checkpoint, name) for name in checkpoint.manifest.files}
    assert restore(files, model, torch.optim.SGD(model.parameters(), lr=0.1), None).step == 5
    assert model.weight.tolist() == [[5.0, 5.0]]
    assert scene.saver.close(30)


def test_training_goes_on_while_a_snapshot_is_written(tmp_path: Path) -> None:
    gate = Gate()
    scene = Scene(tmp_path, gate)
    scene.saver.save(take(1), {}, {})
    assert gate.reached.wait(30)
    assert not scene.saver.idle
    assert not scene.saver.wait(0)
    gate.opened.set()
    assert scene.saver.wait(30)
    assert scene.steps() == [1]


def test_a_second_save_waits_for_the_first_and_the_stall_is_measured(tmp_path: Path) -> None:
    gate = Gate()
    scene = Scene(tmp_path, gate)
    scene.saver.save(take(1), {}, {})
    assert gate.reached.wait(30)
    second = take(2)
    opener = threading.Timer(0.2, gate.opened.set)
    opener.start()
    scene.saver.save(second, {}, {})
    assert gate.opened.is_set()
    assert scene.saver.close(30)
    saved = [event for event in scene.events if isinstance(event, CheckpointSaved)]
    assert [event.step for event in saved] == [1, 2]
    assert saved[1].stall_s >= 0.1 + second.seconds


def test_r6_a_store_that_hangs_stalls_training_no_longer_than_the_limit(tmp_path: Path) -> None:
    gate = Gate()
    scene = Scene(tmp_path, gate, max_stall_s=0.01)
    scene.saver.save(take(1), {}, {})
    assert gate.reached.wait(30)
    scene.saver.save(take(2), {}, {})
    assert [event.step for event in scene.failures()] == [2]
    assert "still being written" in scene.failures()[0].reason
    assert isinstance(scene.saver.last_error, CheckpointError)
    assert not scene.saver.close(0.01)
    gate.opened.set()
    assert scene.saver.wait(30)
    assert scene.steps() == [1]


def test_r7_a_failing_store_is_an_event_and_a_last_error_and_the_next_save_clears_it(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    scene = Scene(tmp_path, FirstFail("write", times=3, error=full))
    scene.saver.save(take(1), {}, {})
    assert scene.saver.wait(30)
    assert [event.step for event in scene.failures()] == [1]
    assert "No space left on device" in scene.failures()[0].reason
    assert isinstance(scene.saver.last_error, CheckpointError)
    assert scene.steps() == []
    scene.saver.save(take(2), {}, {})
    assert scene.saver.wait(30)
    assert scene.saver.last_error is None
    assert scene.steps() == [2]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError()])
def test_r6_an_error_that_nobody_foresaw_is_told_too(tmp_path: Path, error: Exception) -> None:
    def broken(operation: str, path: str) -> None:
        raise error

    scene = Scene(tmp_path, broken)
    scene.saver.save(take(1), {}, {})
    assert scene.saver.wait(30)
    assert scene.saver.last_error is error
    assert scene.failures()[0].reason == (str(error) or "MemoryError")


def test_a_state_that_cannot_be_written_is_told_not_raised(tmp_path: Path) -> None:
    taken = take(1)
    taken.rest["optimizer"]["helper"] = object()
    scene = Scene(tmp_path)
    scene.saver.save(taken, {}, {})
    assert scene.saver.wait(30)
    assert "optimizer.helper" in scene.failures()[0].reason


def test_r8_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for step, score in enumerate([0.9, 0.1, float("nan"), 0.5, 0.4, 0.3], start=1):
        scene.saver.save(take(step), {"valid/loss": score}, {})
    assert scene.saver.close(30)
    assert scene.steps() == [2, 5, 6]
    assert scene.failures() == []


def test_r8_one_to_which_somebody_refers_stays_until_nobody_does(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.saver.save(take(1), {}, {})
    assert scene.saver.wait(30)
    scene.store.pin(["step-000000001"])
    for step in (2, 3, 4):
        scene.saver.save(take(step), {"valid/loss": 0.5}, {})
    assert scene.saver.wait(30)
    assert scene.steps() == [1, 3, 4]
    scene.store.pin([])
    scene.saver.save(take(5), {"valid/loss": 0.5}, {})
    assert scene.saver.close(30)
    assert scene.steps() == [4, 5]


def test_r8_damaged_pins_do_not_stand_in_the_way_of_saving(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    (tmp_path / "pins.json").write_bytes(b"\xff[")
    for step in (1, 2, 3):
        scene.saver.save(take(step), {"valid/loss": 0.5}, {})
    assert scene.saver.close(30)
    assert (scene.steps(), scene.failures(), scene.saver.last_error) == ([2, 3], [], None)


def test_r8_pins_that_cannot_be_read_are_told_and_nothing_is_deleted_but_the_save_is_good(tmp_path: Path) -> None:
    scene = Scene(tmp_path, FirstFail("open_input_stream", times=9, suffix="pins.json"))
    for step in (1, 2, 3):
        scene.saver.save(take(step), {"valid/loss": 0.5}, {})
    assert scene.saver.close(30)
    assert scene.steps() == [1, 2, 3]
    assert scene.saver.last_error is None
    assert ["old ones stay" in failure.reason for failure in scene.failures()] == [True, True, True]


def test_r7_what_killed_and_failed_saves_left_goes_with_the_next_good_one(tmp_path: Path) -> None:
    is_broken = True

    def broken(operation: str, path: str) -> None:
        if is_broken and (operation == "delete_dir" or (operation == "write" and path.endswith("state.pt"))):
            raise OSError(errno.EROFS, "Read-only file system")

    with contextlib.suppress(Killed):
        store_at(tmp_path, KillAt(3)).write(1, {"model.safetensors": b"weights"}, {}, {})
    scene = Scene(tmp_path, broken)
    scene.saver.save(take(2), {}, {})
    assert scene.saver.wait(30)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-000000001", "step-000000002"]
    is_broken = False
    scene.saver.save(take(3), {}, {})
    assert scene.saver.wait(30)
    assert [event.step for event in scene.failures()] == [2]
    assert os.listdir(tmp_path / "checkpoints") == ["step-000000003"]
    assert scene.steps() == [3]


def test_r8_what_was_just_written_stays_though_a_damaged_one_has_a_later_step(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for step in (7, 8, 9):
        scene.store.write(step, {"state.pt": b"good"}, {}, {})
    for step in (8, 9):
        (tmp_path / f"checkpoints/step-{step:09d}/state.pt").write_bytes(b"evil")
    newest = scene.store.newest_verified()
    assert newest is not None
    assert newest.step == 7
    scene.saver.save(take(7), {}, {})
    assert scene.saver.wait(30)
    newest = scene.store.newest_verified()
    assert newest is not None
    assert newest.name == "step-000000007-2"


def test_an_old_checkpoint_that_cannot_be_deleted_is_told_but_the_save_is_good(tmp_path: Path) -> None:
    scene = Scene(tmp_path, FirstFail("delete_file", times=3))
    for step in (1, 2, 3, 4):
        scene.saver.save(take(step), {"valid/loss": -step}, {})
    assert scene.saver.close(30)
    assert scene.saver.last_error is None
    assert [event.step for event in scene.failures()] == [3]
    assert "old ones stay" in scene.failures()[0].reason
    assert scene.steps() == [3, 4]
