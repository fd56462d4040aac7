"""How a worker speaks to the rendezvous: a small protocol, so that tests can carry it without Ray."""

from __future__ import annotations

from typing import Any, Protocol

import ray

from raytrain.rendezvous.state import Entrant, Generation


class RendezvousClient(Protocol):
    """What the worker's loop needs."""

    def enter(self, entrant: Entrant) -> Generation | None:
        """Blocks until a generation forms; None when the run is over."""

    def watch(self, generation: int) -> tuple[bool, bool]:
        """Blocks for some seconds at most; whether newcomers wait, and whether to stop."""

    def close(self) -> None:
        """Says that the run is over."""


class RayRendezvousClient:
    """Speaks to a `RendezvousActor` from a Ray Train worker."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._handle = ray.get_runtime_context().current_actor

    def enter(self, entrant: Entrant) -> Generation | None:
        while True:
            generation: Generation | None = ray.get(self._actor.enter.remote(entrant, self._handle))
            if generation is None or generation.has(entrant.worker):
                return generation

    def watch(self, generation: int) -> tuple[bool, bool]:
        newcomers, stop = ray.get(self._actor.watch.remote(generation))
        return bool(newcomers), bool(stop)

    def close(self) -> None:
        ray.get(self._actor.close.remote())
