"""Runs on real Ray with something happening to them: a viewer that acts, and what every such run must show afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

import raytrain
from raytrain.events.curve import curve
from raytrain.events.kinds import Event, GenerationFormed, Member, StepsDone, WorkerLeft, WorkerLost
from raytrain.events.log import read
from raytrain.report.audit import audit
from raytrain.rundir import RunDir
from raytrain.task import Task
from tests.laws.compare import assert_same, by_hand, settings
from tests.support.tasks import Gated


class Script:
    """A viewer that acts: `act` is called with all events so far, each time that there are new ones."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_events(self, events: Sequence[Event]) -> None:
        self.events += events
        self.act()

    def tick(self, now: float) -> None:
        return None

    def say(self, text: str, now: float) -> None:
        return None

    def act(self) -> None:
        raise NotImplementedError

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def finished(self) -> int:
        return max((e.first_step + len(e.losses) for e in self.of(StepsDone)), default=0)

    @property
    def generation(self) -> GenerationFormed | None:
        """The newest one."""
        formed = self.of(GenerationFormed)
        return formed[-1] if formed else None

    @property
    def members(self) -> list[Member]:
        return list(self.generation.members) if self.generation else []


class Story(Script):
    """Acts once for each of its parts, in their order: a part is a condition and what is done when it holds.

    Args:
        parts: functions of this story; each returns whether it has done its part.
        gate: opened after the last part, so that the rest of the run is quick.
    """

    def __init__(self, gate: Path, *parts: Callable[[Story], bool]) -> None:
        super().__init__()
        self.gate, self.parts = gate, list(parts)
        self.num_done = 0
        self.times: list[float] = []
        """Unix times at which the parts were done."""

    def act(self) -> None:
        while self.num_done < len(self.parts) and self.parts[self.num_done](self):
            self.num_done += 1
            self.times.append(time.time())
        if self.num_done == len(self.parts):
            self.gate.unlink(missing_ok=True)

    def tick(self, now: float) -> None:
        self.act()


def trained(num_workers: int, steps: int = 3) -> Callable[[Story], bool]:
    """Until a generation of so many workers, all of which are still there, has finished some steps."""

    def check(story: Story) -> bool:
        formed = story.generation
        gone = {event.worker for event in [*story.of(WorkerLost), *story.of(WorkerLeft)]}
        if formed is None or gone & {member.worker for member in formed.members}:
            return False
        return len(formed.members) == num_workers and story.finished >= formed.step + steps

    return check


def then(do: Callable[[Story], None]) -> Callable[[Story], bool]:
    """Does something, at once."""

    def part(story: Story) -> bool:
        do(story)
        return True

    return part


def seen(kind: type[Event], times: int = 1) -> Callable[[Story], bool]:
    """Until events of a kind have been seen."""
    return lambda story: len(story.of(kind)) >= times


def signal_rank(rank: int, number: signal.Signals = signal.SIGKILL) -> Callable[[Story], bool]:
    return then(lambda story: os.kill(story.members[rank].pid, number))


def run(tmp_path: Path, script: Script, gate: Path, task: Task | None = None, **more: Any) -> tuple[RunDir, list[Event]]:
    """Trains to the end; the losses and weights are those of the plain loop, the audit passes, and every part was played."""
    config = settings(**{"storage": str(tmp_path), "checkpoint_every": 3, **more})
    raytrain.Trainer(task or Gated(gate=str(gate)), config).fit(script)
    if isinstance(script, Story):
        assert script.num_done == len(script.parts), f"only {script.num_done} of {len(script.parts)} parts were played"
    run_dir = RunDir.at(str(tmp_path), config.name)
    assert_same(run_dir, curve(read(run_dir)), by_hand("dropout", settings(epochs=config.epochs)))
    report = audit(run_dir)
    assert report.passed, report.lines()
    return run_dir, list(read(run_dir))


def actor_pid(title: str) -> int:
    """The process of an actor of this Ray, by the beginning of the title that Ray gives it."""
    session = os.path.basename(ray._private.worker.global_worker.node.get_session_dir_path())
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_text().startswith(f"ray::{title}"):
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                if session in Path(f"/proc/{parent}/cmdline").read_text():
                    return int(pid)
    raise AssertionError(f"there is no {title}")
