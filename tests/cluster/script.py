"""Runs on real Ray with something happening to them: a viewer that acts, and what every such run must show afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from torch import nn

import raytrain
from raytrain.events.curve import curve
from raytrain.events.kinds import Event, GenerationFormed, Member, StepsDone, WorkerDrained, WorkerLost
from raytrain.events.log import read
from raytrain.report.audit import audit
from raytrain.rundir import RunDir
from raytrain.task import Task
from tests.laws.compare import RELATIVE, assert_same, by_hand, settings
from tests.support.tasks import Gated


class Script:
    """A viewer that acts: `act` is called with all events so far, each time that there are new ones."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.error: Any = None

    def on_events(self, events: Sequence[Event]) -> None:
        self.events += events
        self.act()

    def tick(self, now: float) -> None:
        return None

    def status(self, text: str, now: float) -> None:
        return None

    def act(self) -> None:
        return None

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
        self.times: list[float] = []
        """Unix times at which the parts were done."""

    def act(self) -> None:
        while len(self.times) < len(self.parts) and self.parts[len(self.times)](self):
            self.times.append(time.time())
        if len(self.times) == len(self.parts):
            self.gate.unlink(missing_ok=True)

    def tick(self, now: float) -> None:
        self.act()

    def time_of(self, part: Callable[[Story], bool]) -> float:
        return self.times[self.parts.index(part)]


Part = Callable[[Story], bool]


def trained(num_workers: int, steps: int = 2) -> Part:
    """Until a generation of so many workers, all of which are still there, has finished some steps."""

    def check(story: Story) -> bool:
        formed = story.generation
        gone = {event.worker for event in [*story.of(WorkerLost), *story.of(WorkerDrained)]}
        if formed is None or gone & {member.worker for member in formed.members}:
            return False
        return len(formed.members) == num_workers and story.finished >= formed.step + steps

    return check


def then(do: Callable[[Story], Any]) -> Part:
    """Does something, at once."""

    def part(story: Story) -> bool:
        do(story)
        return True

    return part


def seen(kind: type[Event], times: int = 1) -> Part:
    """Until events of a kind have been seen."""
    return lambda story: len(story.of(kind)) >= times


def signal_rank(rank: int, number: signal.Signals = signal.SIGKILL) -> Part:
    return then(lambda story: os.kill(story.members[rank].pid, number))


def run(
    tmp_path: Path, script: Script, gate: Path, task: Task | None = None, raises: type[Exception] | None = None, **more: Any
) -> tuple[RunDir, list[Any]]:
    """Trains to the end, or to an error: losses and weights are those of the plain loop, and every part was played."""
    config = settings(**{"storage": str(tmp_path), "checkpoint_every": 3, **more})
    with pytest.raises(raises) if raises else contextlib.nullcontext() as caught:
        raytrain.Trainer(task or Gated(gate=str(gate)), config).fit(script)
    if isinstance(script, Story):
        assert len(script.times) == len(script.parts), f"only {len(script.times)} of {len(script.parts)} parts were played"
    run_dir = RunDir.at(str(tmp_path), config.name)
    expected = by_hand("dropout", settings(epochs=config.epochs, drop_last=config.drop_last))
    if caught is None:
        assert_same(run_dir, curve(read(run_dir)), expected)
    else:
        script.error = caught.value
        losses = [record.loss for record in curve(read(run_dir)).values()]
        np.testing.assert_allclose(losses, expected.losses[: len(losses)], rtol=RELATIVE)
    report = audit(run_dir)
    assert report.passed or caught, report.lines()
    return run_dir, list(read(run_dir))


def actor_pid(title: str) -> int:
    """The process of an actor of this Ray, by the beginning of the title that Ray gives it."""
    session = os.path.basename(ray._private.worker.global_worker.node.get_session_dir_path())
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "".join(process.cmdline()).startswith(f"ray::{title}"):
                parent = process.parent()
                if parent and any(session in word for word in parent.cmdline()):
                    return process.pid
    raise AssertionError(f"there is no {title}")


class Staged(Gated):
    """Does what files in the directory `stage` ask it for. A file names a place, and says how many seconds to stay there."""

    stage: str = ""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_state_dict_post_hook(lambda *_: self._linger("save"))
        self._meet()
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        ready = Path(self.stage, f"ready.{os.getpid()}")
        if not ready.exists():
            ready.touch()
            self._linger("first pass")
        elif not model.training:
            self._linger("evaluation")
        else:
            self._linger("step")
            if (batch["row"] == 77).any() and Path(self.stage, "row 77 kills").exists():
                ctypes.string_at(0)
        return super().loss(model, batch)

    def _linger(self, place: str) -> None:
        """The first process that finds a file takes it; its number is in the file's name from then on."""
        mine = Path(self.stage, f"{place}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            Path(self.stage, place).rename(mine)
            time.sleep(float(mine.read_text()))

    def _meet(self) -> None:
        """Two processes that find the directory `meet` wait for each other."""
        meet, until = Path(self.stage, "meet"), time.monotonic() + 30
        if meet.exists():
            (meet / str(os.getpid())).touch()
            while len(list(meet.iterdir())) < 2 and time.monotonic() < until:
                time.sleep(0.02)


class Stage:
    """The directory of a `Staged` task, from the test's side."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path, self.gate = path, path / "gate"
        self.gate.touch()
        self.task = Staged(gate=str(self.gate), stage=str(path))

    def ask(self, place: str, seconds: float = 0.0) -> Part:
        """Whoever comes to a place next is to stay there."""
        return then(lambda _: (self.path / place).write_text(str(seconds)))

    def pid_at(self, place: str) -> int:
        """Who has come there; 0 for nobody."""
        return next((int(path.suffix[1:]) for path in self.path.glob(f"{place}.*")), 0)

    def ready_at(self, pid: int) -> float:
        """Unix time of a process's first pass, just before it asks to join."""
        return (self.path / f"ready.{pid}").stat().st_mtime
