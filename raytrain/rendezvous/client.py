"""How a worker speaks to the rendezvous: a small protocol, so that tests can carry it without Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError

from raytrain.rendezvous.generation import Entrant, Generation, Signals
from raytrain.rendezvous.vitals import Answer, Beat

RETRY_EVERY_S = 0.2
ANSWERS_WITHIN_S = 5.0
"""A call to an actor that is away fails sooner."""
BEAT_LIMIT_S = 5.0


class RendezvousClient(Protocol):
    """What the worker's loop needs."""

    def enter(self, entrant: Entrant) -> Generation | None:
        """Blocks until a generation forms; None when the worker may go."""

    def watch(self, generation: int) -> Signals:
        """Blocks for some seconds at most; what the members should do after their step."""

    def beat(self, beat: Beat) -> bool:
        """Sends a heartbeat; returns whether the worker's generation has lost a member."""

    def close(self) -> None:
        """Says that the run is over."""


class RayRendezvousClient:
    """Speaks to a `RendezvousActor` from a Ray Train worker. An actor that died comes back: until then calls wait.

    Args:
        actor: handle of the `RendezvousActor`.
        limit_s: how long it may be away.
        sleep: waits for that many seconds.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        actor: Any,
        limit_s: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._actor, self._limit_s, self._sleep, self._clock = actor, limit_s, sleep, clock
        self._handle = ray.get_runtime_context().current_actor
        self._is_known = False
        self._told: Generation | None = None

    def enter(self, entrant: Entrant) -> Generation | None:
        while True:
            generation: Generation | None = self._persist(self._actor.enter, entrant, self._handle)
            if generation is None or generation.has(entrant.worker):
                self._told = generation
                return generation

    def watch(self, generation: int) -> Signals:
        signals: Signals = self._persist(self._actor.watch, generation)
        return signals

    def beat(self, beat: Beat) -> bool:
        beat = replace(beat, generation=self._told)  # also before its process group is there
        answer = self._tell(beat.in_short(), None) if self._is_known else None
        if answer is None or not answer.is_known:
            answer = self._tell(beat, self._handle)
        self._is_known = True
        return answer.is_broken

    def close(self) -> None:
        self._persist(self._actor.close)

    def _tell(self, beat: Beat, handle: Any) -> Answer:
        answer: Answer = ray.get(self._actor.beat.remote(beat, handle), timeout=BEAT_LIMIT_S)
        return answer

    def _persist(self, method: Any, *arguments: Any) -> Any:
        """Repeats a call for as long as the actor is away."""
        until = None
        while True:
            asked = self._clock()
            try:
                return ray.get(method.remote(*arguments))
            except RayActorError:
                now = self._clock()
                if until is None or now - asked > ANSWERS_WITHIN_S:  # it was there, and the call waited in it
                    until = now + self._limit_s
                if now > until:
                    raise
                self._sleep(RETRY_EVERY_S)
