"""The rendezvous as a Ray actor: listens to heartbeats, lets workers wait for a generation, and answers calls.

One per run, in a process of its own on the driver's node, without CPUs. All decisions are made by `state.Rendezvous` and
`vitals.Vitals`; this file only knows time, and whom to tell. Ray starts it again if it dies: it then learns from the
heartbeats who trains, before it lets anybody in.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import ray
import ray.train  # the handles of workers need it, and the first one should not wait for it

from raytrain.rendezvous.asking import Asking
from raytrain.rendezvous.door import Door, Reply
from raytrain.rendezvous.generation import NOBODY, Entrant, Generation, Signals
from raytrain.rendezvous.state import Rendezvous
from raytrain.rendezvous.vitals import Answer, Beat, Limits, Vitals

LOOK_EVERY_S = 0.5
WATCH_S = 10.0


@dataclass(frozen=True)
class Survey:
    """What the controller wants to know.

    Args:
        given_up: workers that were given up and killed since the rendezvous began, and why.
        left: workers that left as they were asked to.
        members: of the latest generation, in the order of ranks.
        step: the most finished steps that anybody has told of.
    """

    given_up: dict[str, str]
    left: frozenset[str]
    members: tuple[str, ...]
    step: int


class RendezvousActor:
    """Runs as an asyncio actor, so that any number of workers can wait in it.

    Args:
        min_workers: the smallest generation.
        limits: when a silent or stuck worker is given up.
        is_reborn: whether it takes over from one that died; asked of Ray by default.
    """

    def __init__(self, min_workers: int, limits: Limits | None = None, is_reborn: bool | None = None) -> None:
        self._state, self._vitals = Rendezvous(min_workers), Vitals(limits or Limits(), LOOK_EVERY_S)
        self._handles: dict[str, Any] = {}
        self._given_up: dict[str, str] = {}
        self._left: set[str] = set()
        self._door = Door(self._form, self._reply)
        self._asking = Asking(lambda: self._state.to_ask, self._handles, self._lose)
        self._looking: asyncio.Task[None] | None = None
        if is_reborn is None:
            is_reborn = ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed
        self._opens_at = time.monotonic() + self._vitals.limits.heartbeat_s if is_reborn else 0.0
        """By then everybody who lives has said in which generation it is; who has not is dead by the same limit."""

    async def start(self, worker: str) -> None:
        """The process of `worker` runs; it will enter soon."""
        self._state.start(worker)
        self._vitals.expect(worker, time.monotonic(), is_starting=True)

    async def beat(self, beat: Beat, handle: Any = None) -> Answer:
        """Takes a heartbeat; its generation may come without its members, once they are known."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_after())
        self._state.reached = max(self._state.reached, beat.step)
        if beat.worker not in self._given_up and beat.worker not in self._left:
            self._vitals.note(beat, time.monotonic())
        if handle is not None:
            self._handles[beat.worker] = handle
        is_known = beat.worker in self._handles
        if beat.generation is None:
            return Answer(False, is_known)
        number = beat.generation.number
        if number > self._state.generation.number and not self._is_open:
            if not beat.generation.members:
                return Answer(False, is_known=False)
            self._adopt(beat.generation)
        is_broken = self._state.is_broken if number == self._state.generation.number else self._is_open
        return Answer(is_broken, is_known)

    async def lose(self, worker: str) -> None:
        """The process of `worker` is gone."""
        self._lose(worker)

    async def leave(self, worker: str) -> bool:
        """Asks `worker` to leave after its step; returns whether it has a part in the run that must be waited for."""
        while not self._is_open:
            await self._door.news(LOOK_EVERY_S)
        must_wait = self._state.leave(worker) or worker in self._left
        self._door.change()
        return must_wait

    async def enter(self, entrant: Entrant, handle: Any) -> Generation | None:
        """Blocks until a generation with this worker forms; None when it may go: the run is over, or it was to leave.

        Returns NOBODY if the worker was taken for dead while it waited. Nobody enters again in its name, since the call of a
        worker that is really dead waits here like any other.
        """
        self._handles[entrant.worker] = handle
        self._state.enter(entrant, time.monotonic())
        self._asking.hurry()
        return await self._door.wait(entrant)

    async def watch(self, generation: int) -> Signals:
        """Blocks, for some seconds at most, until members of `generation` should do something after their step."""
        until = time.monotonic() + WATCH_S
        while (signals := self._signals(generation)) == Signals() and time.monotonic() < until:
            await self._door.news(0.1 if self._state.newcomers else 0.5)
        return signals

    async def survey(self) -> Survey:
        """The state of things, for the controller."""
        members = tuple(member.worker for member in self._state.generation.members)
        return Survey(dict(self._given_up), frozenset(self._left), members, self._state.reached)

    async def stop(self) -> None:
        """Asks the members to stop at the next step boundary."""
        self._state.stop_asked = True
        self._door.change()

    async def give_up(self) -> None:
        """Too few workers for too long: those at the door form a generation, to save their state and stop."""
        self._state.min_workers, self._state.stop_asked = 1, True
        self._door.change()

    async def close(self) -> None:
        """The run is over: whoever waits at the door may go."""
        self._state.closed = True
        self._door.change()

    @property
    def _is_open(self) -> bool:
        return time.monotonic() >= self._opens_at

    def _signals(self, generation: int) -> Signals:
        if not self._is_open:
            return Signals(stop=self._state.stop_asked)
        if generation != self._state.generation.number:
            return Signals(gather=True)  # the others have gone on without it
        return self._state.signals(time.monotonic())

    def _form(self) -> bool:
        """Lets those go who may, and forms the next generation if it can; whether something has changed."""
        if not self._is_open:
            return False
        going = self._state.dismiss()
        for worker in going:
            self._left.add(worker)
            self._vitals.forget(worker)
        return self._state.form(time.monotonic()) is not None or bool(going)

    def _reply(self, entrant: Entrant) -> Reply:
        if self._state.closed or entrant.worker in self._left:
            return True, None
        generation = self._state.generation if self._state.has_admitted(entrant) else NOBODY
        return not self._state.is_waiting(entrant), generation

    def _adopt(self, generation: Generation) -> None:
        self._state.adopt(generation)
        for member in generation.members:
            self._vitals.expect(member.worker, time.monotonic(), is_starting=False)

    def _lose(self, worker: str) -> None:
        self._state.lose(worker, time.monotonic())
        self._vitals.forget(worker)
        self._door.change()

    async def _look_after(self) -> None:
        """Gives up workers that are silent or stuck."""
        while not self._state.closed:
            await asyncio.sleep(LOOK_EVERY_S)
            now = time.monotonic()
            verdicts = self._vitals.verdicts(now, self._state.late(now, self._vitals.limits.heartbeat_s))
            for worker, why in verdicts.items():
                self._given_up[worker] = why
                if worker in self._handles:
                    ray.kill(self._handles[worker])  # the controller is told in its survey, and replaces it
                self._lose(worker)
