"""What the driver does while a run goes on: hands events to the viewer, and passes on the wish to stop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import ray

from raytrain.errors import RaytrainError
from raytrain.events.kinds import Event
from raytrain.launch.stopping import StopWish


class Viewer(Protocol):
    """Somebody who watches a run; called from the driver's main thread."""

    def on_events(self, events: Sequence[Event]) -> None:
        """Takes what is new, oldest first."""

    def tick(self, now: float) -> None:
        """Called several times a second; `now` in Unix seconds."""

    def say(self, text: str, now: float) -> None:
        """What the driver does before there are events; `now` in Unix seconds."""


class Nobody:
    """Does not watch."""

    def on_events(self, events: Sequence[Event]) -> None:
        """Looks away."""

    def tick(self, now: float) -> None:
        """Looks away."""

    def say(self, text: str, now: float) -> None:
        """Looks away."""


class StopLimit(RaytrainError):
    """The workers did not come to a stop within the time that a stop may take."""


class Watch:
    """Looks at a run several times a second, and never waits for an answer.

    Args:
        sink, rendezvous: actor handles.
        viewer: is told each event.
        wish: whether to stop.
        stop_grace_s: seconds that a stop may take.
    """

    def __init__(self, sink: Any, rendezvous: Any, viewer: Viewer, wish: StopWish, stop_grace_s: float) -> None:
        self._sink, self._rendezvous, self._viewer = sink, rendezvous, viewer
        self._wish, self._stop_grace_s = wish, stop_grace_s
        self._asked_to_stop = False
        self._next: int = ray.get(sink.opened_at.remote())
        self._asked = self._ask()

    def look(self) -> None:
        """Raises StopLimit when a stop takes too long."""
        if ray.wait([self._asked[1]], timeout=0)[0]:
            self._show(*self._asked)
            self._asked = self._ask()
        self._viewer.tick(time.time())
        if self._wish.signal is not None and not self._asked_to_stop:
            self._asked_to_stop = True
            self._rendezvous.stop.remote()
        if self._wish.waited_s > self._stop_grace_s:
            raise StopLimit(f"the workers did not finish a step and save it within {self._stop_grace_s:g} s")

    def last_look(self) -> None:
        """Shows what has not been shown yet; also right after a second signal broke into `look`, wherever it was."""
        self._show(*self._asked)
        self._show(*self._ask())

    def _ask(self) -> tuple[int, Any]:
        """Asks for the events from number `_next` on: that number, and where the answer will be."""
        return self._next, self._sink.since.remote(self._next)

    def _show(self, first: int, answer: Any) -> None:
        events: list[Event] = ray.get(answer)[self._next - first :]
        self._next += len(events)
        if events:
            self._viewer.on_events(events)
