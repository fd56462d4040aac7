"""The process of a worker in a run without Ray: connects the product's loop to the pipe, and dies where it is told to."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from raytrain.checkpoint.saver import Saver
from raytrain.checkpoint.store import CheckpointStore
from raytrain.data.feed import Feed
from raytrain.rendezvous.state import Entrant, Generation, Signals
from raytrain.rendezvous.vitals import Beat
from raytrain.rundir import RunDir
from raytrain.worker import boundary, loop
from raytrain.worker.loop import Loop
from raytrain.worker.pulse import Pulse
from raytrain.worker.state import TrainState
from raytrain.worker.step import Stepper
from raytrain.worker.surroundings import Surroundings
from raytrain.worker.telemetry import Telemetry
from tests.support.local import ChildJob, Kill, kill_self

PLACES: dict[str, tuple[Any, str, bool]] = {
    "before reading": (Feed, "step", True),
    "before forward": (Stepper, "_forward", True),
    "after forward": (Stepper, "_forward", False),
    "after backward": (Stepper, "_backward", False),
    "before commit": (Stepper, "_commit", True),
    "after commit": (Stepper, "_commit", False),
    "before recording": (Telemetry, "record", True),
    "after recording": (Telemetry, "record", False),
    "before evaluation": (boundary, "evaluate", True),
    "after evaluation": (boundary, "evaluate", False),
    "while saving": (Saver, "_write", True),
    "before handing over": (loop, "synchronise", True),
    "after handing over": (loop, "synchronise", False),
}
"""Where a worker can die: an attribute of the product, and whether before or after it is called."""


class Pipe:
    """Calls over a pipe, one at a time, from whichever thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def ask(self, message: Any) -> Any:
        with self._lock:
            self._connection.send(message)
            return self._connection.recv()


class PipeRendezvous:
    """The worker's side of the rendezvous."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def ask(self, request: str, argument: Any = None) -> Any:
        return self._pipe.ask((request, argument))

    def enter(self, entrant: Entrant) -> Generation | None:
        generation: Generation | None = self.ask("enter", entrant)
        return generation

    def watch(self, generation: int) -> Signals:
        signals: Signals = self.ask("watch", generation)
        return signals

    def beat(self, beat: Beat) -> bool:
        return False  # a child that dies is noticed by the end of its pipe

    def close(self) -> None:
        self.ask("close")


def run_child(job: ChildJob, calls: Connection, events: Connection) -> None:
    """Target of a worker's process."""
    torch.set_num_threads(1)
    rendezvous, told = PipeRendezvous(Pipe(calls)), Pipe(events)
    telemetry = Telemetry(lambda events, limit_s: told.ask(events))
    around = Surroundings(
        task=job.task,
        config=job.config,
        sources=job.sources,
        plans=job.work.plans,
        num_steps=job.work.num_steps,
        run_facts={},
        rendezvous=rendezvous,
        store=CheckpointStore(RunDir.at(job.storage, job.config.name)),
        telemetry=telemetry,
        pulse=Pulse(rendezvous, job.worker, every_s=60.0),
        worker=job.worker,
        host="127.0.0.1",
        node_id="",
        pid=os.getpid(),
        device=torch.device("cpu"),
    )
    try:
        state_of = _remember_state()
        for step, request in ((job.hold, "hold"), (job.abandon, "abandon")):
            if step is not None:
                _ask_before(step, request, rendezvous)
        for kill in job.kills:
            _plant(kill, state_of, rendezvous)
        Loop(around).run()
        telemetry.close()
        rendezvous.ask("done")
    except BaseException as error:  # noqa: BLE001 - it is raised again in the test
        telemetry.close()
        rendezvous.ask("error", error)


def _remember_state() -> Callable[[], TrainState | None]:
    """How to get at the state of the loop that will be built in this process."""
    states: list[TrainState] = []
    build = loop.build_state

    def remembering(*args: Any) -> TrainState:
        states.append(build(*args))
        return states[-1]

    loop.build_state = remembering
    return lambda: states[-1] if states else None


def _ask_before(step: int, request: str, rendezvous: PipeRendezvous) -> None:
    original = Feed.step

    def holding(self: Feed, wanted: int) -> Any:
        if wanted == step:
            rendezvous.ask(request)
        return original(self, wanted)

    Feed.step = holding  # type: ignore[method-assign]


def _plant(kill: Kill, state_of: Callable[[], TrainState | None], rendezvous: PipeRendezvous) -> None:
    owner, name, before = PLACES[kill.place]
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        state = state_of()
        here = state is not None and state.step == kill.step
        if before and here:
            rendezvous.ask("fired", kill)
            kill_self()
        result = original(*args, **kwargs)
        state = state_of()
        if not before and state is not None and state.step == kill.step:
            rendezvous.ask("fired", kill)
            kill_self()
        return result

    setattr(owner, name, wrapped)
