"""What the driver does while a run goes on: hands events to the viewer, and passes on the wish to stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from raytrain.errors import RaytrainError
from raytrain.events.kinds import Event, RunEnded
from raytrain.launch.stopping import StopWish

START_LIMIT_S = 60.0
END_LIMIT_S = 5.0
ASK_AGAIN_S = 1.0
ASK_EVERY_S = 0.5
"""Between two questions for events; each takes time from workers on the same machine."""


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
    """Looks at a run several times a second, and never waits for an answer for long.

    The two actors may be away for a while, since Ray starts them again when they die: what is asked of them is asked again.

    Args:
        sink, rendezvous: actor handles.
        viewer: is told each event.
        wish: whether to stop.
        stop_grace_s: seconds that a stop may take.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        sink: Any,
        rendezvous: Any,
        viewer: Viewer,
        wish: StopWish,
        stop_grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink, self._rendezvous, self._viewer, self._clock = sink, rendezvous, viewer, clock
        self._wish, self._stop_grace_s = wish, stop_grace_s
        self._asked_to_stop: float | None = None
        self._next: int = ray.get(sink.opened_at.remote(), timeout=START_LIMIT_S)
        self._asked, self._next_look = self._ask(), 0.0

    def tell(self, event: Event) -> None:
        """Puts an event into the run's log, soon."""
        self._sink.append.remote([event])

    def look(self) -> None:
        """Raises StopLimit when a stop takes too long."""
        if self._clock() >= self._next_look and ray.wait([self._asked[1]], timeout=0)[0]:
            self._show(*self._asked)
            self._asked = self._ask()
            self._next_look = self._clock() + ASK_EVERY_S
        self._viewer.tick(time.time())
        if self._wish.signal is not None:
            self._ask_to_stop()
        if self._wish.waited_s > self._stop_grace_s:
            raise StopLimit(f"the workers did not finish a step and save it within {self._stop_grace_s:g} s")

    def finish(self, ended: RunEnded) -> None:
        """Shows what has not been shown yet, and the end; also after a second signal broke into `look`, wherever it was.

        Where the log cannot be reached any more, the viewer learns at least of the end.
        """
        self.tell(ended)
        is_told = self._show(*self._asked, END_LIMIT_S) and self._show(*self._ask(), END_LIMIT_S)
        with contextlib.suppress(RayError):
            ray.get(self._sink.close.remote(), timeout=END_LIMIT_S if is_told else 0.1)
        if not is_told:
            self._viewer.on_events([ended])

    def _ask_to_stop(self) -> None:
        now = self._clock()
        if self._asked_to_stop is None or now - self._asked_to_stop > ASK_AGAIN_S:
            self._asked_to_stop = now
            self._rendezvous.stop.remote()

    def _ask(self) -> tuple[int, Any]:
        """Asks for the events from number `_next` on: that number, and where the answer will be."""
        return self._next, self._sink.since.remote(self._next)

    def _show(self, first: int, answer: Any, limit_s: float = 1.0) -> bool:
        """Shows the events of an answer; returns whether there was one."""
        try:
            events: list[Event] = ray.get(answer, timeout=limit_s)[self._next - first :]
        except RayError:
            return False
        self._next += len(events)
        if events:
            self._viewer.on_events(events)
        return True
