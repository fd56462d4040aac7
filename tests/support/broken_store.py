"""Run in namespaces of its own by `tests.cluster.test_namespaces`: the store is full, read-only, and full for a moment.

A small filesystem lies where the run keeps its checkpoints; its log is elsewhere. The leader dies in the middle of a save.
Prints what happened as JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from raytrain.checkpoint.store import MANIFEST, CheckpointStore
from raytrain.events.kinds import CheckpointFailed, CheckpointSaved, Event, StateRestored, WorkerLost
from raytrain.rundir import CHECKPOINTS, RunDir
from tests.cluster.script import Story, run, seen, then, trained

SIZE = "1m"
"""Room for dozens of the run's checkpoints."""
NEXT_ATTEMPT_S = 0.25
"""The store pauses for longer than that before it writes a file again; writing one takes less."""
PAUSES_S = 1.4
"""The pauses before the second and the third attempt take longer than that."""
Part = Callable[[Story], bool]


class SmallDisk:
    """A filesystem mounted at a directory, with the ways to break it and to mend it."""

    def __init__(self, path: Path) -> None:
        self.path, self._filler = path, path / "filler"
        path.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(path)], check=True)

    def fill(self) -> None:
        """Takes what is free at this moment."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass

    def empty(self) -> None:
        self._filler.unlink()

    def remount(self, mode: str) -> bool:
        """Makes it "ro" or "rw"; returns whether that was possible, which it is not while a file is being written."""
        done = subprocess.run(["mount", "-o", f"remount,{mode}", str(self.path)], check=False, capture_output=True)
        return done.returncode == 0

    def unfinished(self) -> list[Path]:
        return [path for path in self.path.glob("step-*") if not (path / MANIFEST).exists()]

    def is_written_again(self) -> bool:
        """Whether somebody writes a file for the second time, the first one having failed."""
        with contextlib.suppress(FileNotFoundError):
            for directory in self.unfinished():
                made = directory.stat().st_mtime
                if any(file.stat().st_mtime > made + NEXT_ATTEMPT_S for file in directory.iterdir()):
                    return True
        return False


class Scenes:
    """The parts of the story by the fault that they play."""

    def __init__(self, disk: SmallDisk) -> None:
        self.disk, self.left_behind = disk, ""
        self._told_when_emptied = -1
        empty = then(lambda _: disk.empty())
        self.parts: dict[str, list[Part]] = {
            "full": [
                self.fill_until(newer(CheckpointFailed)),
                self.leader_dies_in_a_save,
                seen(WorkerLost),
                newer(CheckpointFailed),
                empty,
                newer(CheckpointSaved),
            ],
            "read-only": [
                lambda _: disk.remount("ro"),
                newer(CheckpointFailed, num_steps=2),
                lambda _: disk.remount("rw"),
                newer(CheckpointSaved),
            ],
            "full for a moment": [trained(2), self.full_until_it_is_written_again],
        }

    def fill_until(self, check: Part) -> Part:
        """Fills the disk again and again, since a checkpoint that is deleted makes room for the next one."""

        def part(story: Story) -> bool:
            self.disk.fill()
            return check(story)

        return part

    def leader_dies_in_a_save(self, story: Story) -> bool:
        for directory in self.disk.unfinished()[:1]:
            os.kill(story.members[0].pid, signal.SIGKILL)
            self.left_behind = directory.name
        return bool(self.left_behind)

    def full_until_it_is_written_again(self, story: Story) -> bool:
        """Two writes of a file fail and the third one does not; tried anew where it came too late on a slow machine."""
        since = story.times[-1]
        saved = [event for event in story.of(CheckpointSaved) if event.time > since]
        if any(event.seconds > PAUSES_S for event in saved):
            return True
        told = len(saved) + len([event for event in story.of(CheckpointFailed) if event.time > since])
        if told == self._told_when_emptied:
            return False
        if self.disk.is_written_again():
            self.disk.empty()
            self._told_when_emptied = told
        else:
            self.disk.fill()
        return False

    def told(self, story: Story, events: list[Event]) -> dict[str, Any]:
        """What the run told during each fault and up to the next one, or to its end."""
        starts = [story.times[story.parts.index(parts[0]) - 1] for parts in self.parts.values()]
        return {
            name: summary([event for event in events if start < event.time < end])
            for name, start, end in zip(self.parts, starts, [*starts[1:], math.inf], strict=True)
        }


def summary(told: list[Event]) -> dict[str, Any]:
    failed = [event for event in told if isinstance(event, CheckpointFailed)]
    return {
        "failures": [event.reason for event in failed],
        "steps_meanwhile": failed[-1].step - failed[0].step if failed else 0,
        "longest_save_s": max(event.seconds for event in told if isinstance(event, CheckpointSaved)),
    }


def newer(kind: type[Event], num_steps: int = 1) -> Part:
    """Until there are events of a kind, of so many steps, that are newer than the last part."""
    return lambda story: len({event.step for event in story.of(kind) if event.time > story.times[-1]}) >= num_steps


def whole(run_dir: RunDir) -> list[str]:
    """The checkpoints that the store lists, each of which is read."""
    store = CheckpointStore(run_dir)
    found = store.list()
    assert all(store.read(checkpoint, name) for checkpoint in found for name in checkpoint.manifest.files)
    return sorted(checkpoint.name for checkpoint in found)


def main(storage: Path) -> None:
    disk = SmallDisk(storage / "run" / CHECKPOINTS)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
    gate = storage / "gate"
    gate.touch()
    scenes = Scenes(disk)
    parts = [part for played in scenes.parts.values() for part in played]
    story = Story(gate, trained(2), seen(CheckpointSaved), *parts)
    run_dir, events = run(storage, story, gate, workers=(1, 2), epochs=8, checkpoint_every=2)
    answer = {
        **scenes.told(story, events),
        "left_behind": scenes.left_behind,
        "restored": [event.step for event in events if isinstance(event, StateRestored)],
        "there": sorted(os.listdir(disk.path)),
        "whole": whole(run_dir),
    }
    print(json.dumps(answer))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
