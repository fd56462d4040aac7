"""A run without Ray: worker processes on gloo, a rendezvous in the test's own process, and kills at planned places.

The training loop is the product's; only its context has stand-ins. A worker that dies is noticed by the end of its
pipe, and may be replaced; the events of the run are collected in its run directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from raytrain.config import RunConfig
from raytrain.events.curve import StepRecord, curve
from raytrain.events.kinds import CheckpointSaved, StepsDone
from raytrain.events.log import EventLog, read
from raytrain.launch.schedule import Schedule, build_schedule, plan_to_json
from raytrain.rendezvous.state import Generation, JoinRequest, Rendezvous, Signals
from raytrain.rundir import RUN, RunDir
from raytrain.task import Task

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "tests.support.tasks", "tests.support.child"])

TICK_S = 0.005


@dataclass(frozen=True)
class Kill:
    """Worker `worker` kills itself with SIGKILL the first time that it is at `place` with at least `step` finished steps.

    `place` names a method of the product and a side, see `tests.support.child.PLACES`.
    """

    worker: str
    place: str
    step: int


@dataclass(frozen=True)
class Break(Kill):
    """The same, but the worker does something else for a while: `how` is "sleep", "hold the GIL", or "stop" for ever."""

    how: str = "sleep"
    seconds: float = 0.0

    def happen(self) -> None:
        if self.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.how == "sleep":
            time.sleep(self.seconds)
        else:
            ctypes.PyDLL(None).usleep(int(self.seconds * 1e6))


@dataclass
class Plot:
    """What happens in a run.

    Args:
        workers: how many begin together.
        spares: how many wait beside these, and beside those that replace them.
        kills: planned deaths and breaks; each must have fired when the run ends.
        replace: start a new worker for each that dies.
        late: steps at which one more worker is started.
        abandon: step before which everything is killed, once there is a checkpoint, as when the driver is killed.
        hold: step before which the workers wait until a newcomer is at the door, so that it joins in time.
    """

    workers: int
    kills: Sequence[Kill] = ()
    replace: bool = True
    late: Sequence[int] = ()
    hold: int | None = None
    abandon: int | None = None
    spares: int = 0


@dataclass
class Child:
    process: Any
    error: BaseException | None = None
    done: bool = False


@dataclass
class LocalRun:
    """Runs a task to its end."""

    task: Task
    config: RunConfig
    storage: Path
    plot: Plot
    limit_s: float = 120.0
    fired: list[Kill] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    _finished: int = 0

    def run(self) -> dict[int, StepRecord]:
        """The committed steps. Raises what a worker raised; AssertionError for a kill that did not fire."""
        self._schedule = build_schedule(self.task, self.config)
        self._dir = RunDir.at(str(self.storage), self.config.name)
        self._dir.write_json({"plan": plan_to_json(self._schedule.train)}, RUN)
        self._log, self._lock = EventLog(self._dir), threading.RLock()
        self._event_threads: list[threading.Thread] = []
        self._finished, self._has_saved, self._is_abandoned = 0, False, False
        self._children: dict[str, Child] = {}
        self._state, self._late = self._build_state(), list(self.plot.late)
        for _ in range(self.plot.workers + self.plot.spares):
            self._start()
        try:
            self._until_over()
        finally:
            with self._lock:
                self._state.closed = True  # nobody is replaced any more
            self._close()
            for child in self._children.values():
                child.process.kill()
                child.process.join()
            for thread in self._event_threads:
                thread.join()
            self._log.close()
        planned = list(self.plot.kills)
        assert self.fired == planned or sorted(map(str, self.fired)) == sorted(map(str, planned)), self.fired
        return curve(read(self._dir))

    @property
    def run_dir(self) -> RunDir:
        return self._dir

    @property
    def num_finished(self) -> int:
        """Steps of which the log knows."""
        return self._finished

    def stop(self) -> None:
        with self._lock:
            self._state.stop_requested = True

    def _build_state(self) -> Rendezvous:
        return Rendezvous(self.plot.workers, max_workers=self.plot.workers if self.plot.spares else sys.maxsize)

    def _close(self) -> None:
        """The run is over; its workers are killed next."""

    def _expect(self, name: str) -> None:
        self._state.expect(name)

    def _report_lost(self, name: str) -> None:
        self._state.report_lost(name, time.monotonic())

    def _start(self) -> None:
        with self._lock:
            name = f"w{len(self._children)}"
            kills, plot = tuple(kill for kill in self.plot.kills if kill.worker == name), self.plot
            job = ChildJob(name, self.task, self.config, self._schedule, str(self.storage), kills, plot.hold, plot.abandon)
            process, calls, events = self._launch(job)
            self._children[name] = Child(process)
            self._expect(name)
            threading.Thread(target=self._serve_calls, args=(name, calls), daemon=True).start()
            self._event_threads.append(threading.Thread(target=self._serve_events, args=(events,), daemon=True))
            self._event_threads[-1].start()

    def _launch(self, job: ChildJob) -> tuple[Any, Connection, Connection]:
        """Starts a process; returns it with the pipes of its calls and of its events."""
        from tests.support.child import run_child

        (calls, their_calls), (events, their_events) = CONTEXT.Pipe(), CONTEXT.Pipe()
        process = CONTEXT.Process(target=run_child, args=(job, their_calls, their_events), daemon=True)
        process.start()
        their_calls.close()
        their_events.close()
        return process, calls, events

    def _serve_calls(self, name: str, pipe: Connection) -> None:
        """Answers one child until it goes."""
        child = self._children[name]
        with contextlib.suppress(EOFError, OSError):
            while (message := pipe.recv()) is not None:
                request, argument = message
                pipe.send(getattr(self, f"_on_{request}")(child, argument))
        with self._lock:
            self._state.min_workers = 1
            self._report_lost(name)
            if not child.done and child.error is None and self.plot.replace and not self._state.closed:
                self._start()

    def _on_fired(self, child: Child, kill: Kill) -> None:
        self.fired.append(kill)

    def _on_done(self, child: Child, _: None) -> None:
        child.done = True

    def _on_error(self, child: Child, error: BaseException) -> None:
        child.error = error

    def _on_close(self, child: Child, _: None) -> None:
        with self._lock:
            self._state.closed = True

    def _on_join(self, child: Child, request: JoinRequest) -> Generation | None:
        with self._lock:
            before = self._state.generation.number
            self._state.join(request, time.monotonic())
        while True:
            with self._lock:
                if self._state.closed:
                    return None
                if formed := self._state.form(time.monotonic()):
                    self.generations.append(formed)
                if self._state.generation.number != before:
                    return self._state.generation
            time.sleep(TICK_S)

    def _on_watch(self, child: Child, generation: int) -> Signals:
        for _ in range(20):
            with self._lock:
                answer = self._state.signals(time.monotonic())
                if answer != Signals() or self._state.generation.number != generation:
                    return answer
            time.sleep(TICK_S)
        return answer

    def _on_hold(self, child: Child, _: None) -> None:
        """Returns when a newcomer waits, or has waited and got in."""
        enough = self.plot.workers + len(self.plot.late)
        while True:
            with self._lock:
                got_in = {member.worker for generation in self.generations for member in generation.members}
                if self._state.candidates or len(got_in | self._state.alive) >= enough:
                    return
            time.sleep(TICK_S)

    def _on_abandon(self, child: Child, _: None) -> None:
        """Waits for a checkpoint; then the main thread kills everybody."""
        while not self._has_saved:
            time.sleep(TICK_S)
        self._is_abandoned = True

    def _serve_events(self, pipe: Connection) -> None:
        """Takes the events of one child until it goes; each delivery is confirmed when it is in the log."""
        with contextlib.suppress(EOFError, OSError):
            while (message := pipe.recv()) is not None:
                batch, durably = message
                with self._lock:
                    receipt, events = self._log.deliver(batch, durably), batch.events
                    self._has_saved |= any(isinstance(event, CheckpointSaved) for event in events)
                    self._finished = max(
                        [self._finished, *(e.first_step + len(e.losses) for e in events if isinstance(e, StepsDone))]
                    )
                    while self._late and self._finished >= self._late[0]:
                        del self._late[0]
                        self._start()
                pipe.send(receipt)

    def _until_over(self) -> None:
        deadline = time.monotonic() + self.limit_s
        while time.monotonic() < deadline:
            with self._lock:
                if self._is_abandoned:
                    return
                for child in self._children.values():
                    if child.error is not None:
                        raise child.error
                if all(child.done or not child.process.is_alive() for child in self._children.values()):
                    return
            time.sleep(0.02)
        raise TimeoutError(f"the run was not over after {self.limit_s} s")


@dataclass(frozen=True)
class ChildJob:
    """What a child is started with."""

    worker: str
    task: Task
    config: RunConfig
    schedule: Schedule
    storage: str
    kills: tuple[Kill, ...]
    hold: int | None
    abandon: int | None
