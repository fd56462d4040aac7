"""How a worker talks to the rendezvous: a small protocol, so that tests can implement it without Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError

from raytrain.rendezvous.health import Heartbeat, HeartbeatReply
from raytrain.rendezvous.state import Generation, JoinRequest, Signals

RETRY_EVERY_S = 0.2
FAST_FAILURE_S = 5.0
"""A call to an actor that is down fails within this time; one that failed later was being served."""
HEARTBEAT_TIMEOUT_S = 5.0


class RendezvousClient(Protocol):
    """What the training loop needs of the rendezvous."""

    def join(self, request: JoinRequest) -> Generation | None:
        """Blocks until a generation forms; None when the worker may exit."""

    def watch(self, generation: int) -> Signals:
        """Blocks for some seconds at most; returns what the members should do after their step."""

    def heartbeat(self, heartbeat: Heartbeat) -> bool:
        """Sends a heartbeat; returns whether the worker's generation has lost a member."""

    def close(self) -> None:
        """Reports that the run is over."""


class RayRendezvousClient:
    """Talks to a `RendezvousActor` from a Ray Train worker. Calls wait while Ray restarts an actor that died.

    Args:
        actor: handle of the `RendezvousActor`.
        timeout_s: how long it may be down.
        sleep: waits for that many seconds.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        actor: Any,
        timeout_s: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._actor, self._timeout_s, self._sleep, self._clock = actor, timeout_s, sleep, clock
        self._handle = ray.get_runtime_context().current_actor
        self._is_known = False
        self._generation: Generation | None = None

    def join(self, request: JoinRequest) -> Generation | None:
        while True:
            generation: Generation | None = self._call(self._actor.join, request, self._handle)
            if generation is None or generation.has(request.worker):
                self._generation = generation
                return generation

    def watch(self, generation: int) -> Signals:
        signals: Signals = self._call(self._actor.watch, generation)
        return signals

    def heartbeat(self, heartbeat: Heartbeat) -> bool:
        heartbeat = replace(heartbeat, generation=self._generation)  # also before its process group exists
        reply = self._send(heartbeat.without_members(), None) if self._is_known else None
        if reply is None or not reply.is_known:
            reply = self._send(heartbeat, self._handle)
        self._is_known = True
        return reply.is_broken

    def close(self) -> None:
        self._call(self._actor.close)

    def _send(self, heartbeat: Heartbeat, handle: Any) -> HeartbeatReply:
        reply: HeartbeatReply = ray.get(self._actor.heartbeat.remote(heartbeat, handle), timeout=HEARTBEAT_TIMEOUT_S)
        return reply

    def _call(self, method: Any, *arguments: Any) -> Any:
        """Repeats a call for as long as the actor is down."""
        deadline = None
        while True:
            called = self._clock()
            try:
                return ray.get(method.remote(*arguments))
            except RayActorError:
                now = self._clock()
                if deadline is None or now - called > FAST_FAILURE_S:  # it was up, and the call was waiting in it
                    deadline = now + self._timeout_s
                if now > deadline:
                    raise
                self._sleep(RETRY_EVERY_S)
