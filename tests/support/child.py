"""The process of a worker in a run without Ray: connects the product's loop to the pipe, and dies where it is told to."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
from ray.exceptions import RayError

from raytrain.checkpoint.saver import Saver
from raytrain.checkpoint.store import CheckpointStore
from raytrain.data.loader import Loader
from raytrain.rendezvous.health import Heartbeat
from raytrain.rendezvous.state import Generation, JoinRequest, Signals
from raytrain.rundir import RunDir
from raytrain.task import Task
from raytrain.worker import boundary, handover, loop
from raytrain.worker.context import RunSpec, WorkerContext
from raytrain.worker.entry import HEARTBEATS_PER_TIMEOUT
from raytrain.worker.failures import WorkerBroken
from raytrain.worker.heartbeat import HeartbeatSender
from raytrain.worker.loop import TrainingLoop
from raytrain.worker.state import TrainState
from raytrain.worker.step import TrainStep
from raytrain.worker.telemetry import Telemetry
from tests.support.local import Break, ChildJob, Kill

PLACES: dict[str, tuple[Any, str, bool]] = {
    "before reading": (Loader, "step", True),
    "before forward": (TrainStep, "_forward", True),
    "after forward": (TrainStep, "_forward", False),
    "after backward": (TrainStep, "_backward", False),
    "before commit": (TrainStep, "_commit", True),
    "after commit": (TrainStep, "_commit", False),
    "before recording": (Telemetry, "record", True),
    "after recording": (Telemetry, "record", False),
    "before evaluation": (boundary, "evaluate", True),
    "after evaluation": (boundary, "evaluate", False),
    "while saving": (Saver, "_write", True),
    "after sending": (handover, "_send_tensors", False),
    "before broadcast": (loop, "broadcast_state", True),
    "after broadcast": (loop, "broadcast_state", False),
}
"""Where a worker can die: an attribute of the product, and whether before or after it is called."""
HOOKS = ("loss", "metrics")
"""The same for hooks of the task."""


class Pipe:
    """Calls over a pipe, one at a time, from whichever thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._is_over = False

    def ask(self, message: Any) -> Any:
        with self._lock:
            if self._is_over:
                raise RayError("this worker is no more")
            self._connection.send(message)
            return self._connection.recv()

    def finish(self) -> None:
        """Says that nothing more comes, though the process lives on."""
        with self._lock:
            self._is_over = True
            self._connection.send(None)


class PipeRendezvous:
    """The worker's side of the rendezvous."""

    def __init__(self, pipe: Pipe, beats: Pipe | None = None) -> None:
        self._pipe, self._beats = pipe, beats

    def ask(self, request: str, argument: Any = None) -> Any:
        return self._pipe.ask((request, argument))

    def join(self, request: JoinRequest) -> Generation | None:
        while True:
            generation: Generation | None = self.ask("join", request)
            if generation is None or generation.has(request.worker):
                return generation

    def watch(self, generation: int) -> Signals:
        signals: Signals = self.ask("watch", generation)
        return signals

    def heartbeat(self, heartbeat: Heartbeat) -> bool:
        return bool(self._beats and self._beats.ask(heartbeat))  # without, a death is noticed by the end of the pipe

    def close(self) -> None:
        self.ask("close")


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Killed(BaseException):
    """Ends a worker in a process that lives on: its process group breaks, and nothing more is heard of it."""


def run_children(jobs: Connection) -> None:
    """Target of a process that is one worker after the other: takes jobs with the pipes of their calls and events."""
    global kill_self  # noqa: PLW0603
    kill_self = _raise_killed
    while (job := jobs.recv()) is not None:
        run_child(*job)
        torch.use_deterministic_algorithms(False)


def _raise_killed() -> None:
    raise Killed


def run_child(job: ChildJob, calls: Connection, events: Connection, beats: Connection | None = None) -> None:
    """Target of a worker's process."""
    torch.set_num_threads(1)
    pipes = Pipe(calls), Pipe(events)
    with ExitStack() as patches, suppress(Killed):
        _run_worker(job, PipeRendezvous(pipes[0], beats and Pipe(beats)), pipes[1], patches)
    for pipe in pipes:
        pipe.finish()


def _run_worker(job: ChildJob, rendezvous: PipeRendezvous, writer: Pipe, patches: ExitStack) -> None:
    telemetry = Telemetry(lambda batch, durably, timeout_s: writer.ask((batch, durably)))
    schedule = job.schedule
    context = WorkerContext(
        spec=RunSpec(job.task, job.config, schedule.sources, schedule.plans, schedule.num_steps, {}, "cpu"),
        rendezvous=rendezvous,
        store=CheckpointStore(RunDir.at(job.storage, job.config.name)),
        telemetry=telemetry,
        heartbeat=HeartbeatSender(rendezvous, job.worker, job.config.heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT),
        worker=job.worker,
        host="127.0.0.1",
        node_id="",
        pid=os.getpid(),
        device=torch.device("cpu"),
    )
    try:
        state_of = _remember_state(patches)
        for step, request in ((job.hold, "hold"), (job.abandon, "abandon")):
            if step is not None:
                _ask_before(step, request, rendezvous, patches)
        for kill in job.kills:
            _plant(kill, type(job.task), state_of, rendezvous, patches)
        training = TrainingLoop(context)
        training.run()
        telemetry.close()
        rendezvous.ask("done")
    except WorkerBroken:
        telemetry._closed.set()
        context.heartbeat.close()
        raise Killed from None
    except Killed:
        training._saver.close()  # a process that is gone writes no checkpoint beside those of the next leader
        telemetry._closed.set()
        context.heartbeat.close()
        raise
    except BaseException as error:  # noqa: BLE001 - it is raised again in the test
        telemetry.close()
        rendezvous.ask("error", error)


def _remember_state(patches: ExitStack) -> Callable[[], TrainState | None]:
    """How to get at the state of the loop that will be built in this process."""
    states: list[TrainState] = []
    build = loop.build_state

    def remembering(*args: Any) -> TrainState:
        states.append(build(*args))
        return states[-1]

    patches.enter_context(mock.patch.object(loop, "build_state", remembering))
    return lambda: states[-1] if states else None


def _ask_before(step: int, request: str, rendezvous: PipeRendezvous, patches: ExitStack) -> None:
    original = Loader.step

    def holding(self: Loader, wanted: int) -> Any:
        if wanted == step:
            rendezvous.ask(request)
        return original(self, wanted)

    patches.enter_context(mock.patch.object(Loader, "step", holding))


def _plant(
    kill: Kill,
    task: type[Task],
    state_of: Callable[[], TrainState | None],
    rendezvous: PipeRendezvous,
    patches: ExitStack,
) -> None:
    owner, name, before = (task, kill.place, True) if kill.place in HOOKS else PLACES[kill.place]
    has_fired = False
    original = getattr(owner, name)

    def happen_if_due() -> None:
        nonlocal has_fired
        state = state_of()
        if not has_fired and state is not None and state.step >= kill.step:
            has_fired = True
            rendezvous.ask("fired", kill)
            kill.happen() if isinstance(kill, Break) else kill_self()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before:
            happen_if_due()
        result = original(*args, **kwargs)
        if not before:
            happen_if_due()
        return result

    patches.enter_context(mock.patch.object(owner, name, wrapped))
