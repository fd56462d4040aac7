"""What does the driver do during a run? It passes events to the viewer, and the user's stop request to the workers.

Ctrl-C, SIGTERM and SIGHUP (a closed terminal) are a request to stop at the next step boundary, within a time limit. They
reach only the driver: Ray's processes, including the workers, have sessions of their own. Runs in the driver's main thread.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from raytrain.errors import RaytrainError, StorageError
from raytrain.events.kinds import CheckpointSaved, Event, RunEnded
from raytrain.rundir import EVENTS

START_LIMIT_S = 60.0
END_LIMIT_S = 5.0
STOP_AGAIN_S = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_S = 0.5
"""The same signal again within this time is the same request: `timeout` and a shell signal a process and its group."""
POLL_EVERY_S = 0.5
"""Between two polls for events; each one takes CPU time from workers on the same machine."""


class Viewer(Protocol):
    """Shows a run; called from the driver's main thread."""

    def on_events(self, events: Sequence[Event]) -> None:
        """Shows new events, oldest first."""

    def tick(self, now: float) -> None:
        """Called several times a second; `now` in Unix seconds."""

    def status(self, text: str, now: float) -> None:
        """Shows what the driver does before there are events; `now` in Unix seconds."""


class NullViewer:
    """Shows nothing."""

    def on_events(self, events: Sequence[Event]) -> None:
        """Does nothing."""

    def tick(self, now: float) -> None:
        """Does nothing."""

    def status(self, text: str, now: float) -> None:
        """Does nothing."""


class StopTimeout(RaytrainError):
    """The workers did not stop within `run.stop_grace_s`."""


class StopRequest:
    """Whether, by which signal, and since when the user wants the run to stop.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.signal: int | None = None
        self._clock = clock
        self._since = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds since the first signal; 0 before."""
        return self._clock() - self._since if self.signal else 0.0

    def listen(self) -> None:
        """Installs the handlers for `SIGNALS`. Main thread only."""
        install(self.on_signal)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal is a request; the second one raises KeyboardInterrupt, which ends the run immediately."""
        if self.signal is None:
            self.signal, self._since = number, self._clock()
        elif number != self.signal or self.waited_s > REPEAT_S:
            raise KeyboardInterrupt


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Signals end the driver in this block as in `exit_on_signals`, or ask it to stop once `listen` is called."""
    with exit_on_signals():
        yield StopRequest()


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """In this block SIGTERM and SIGHUP raise SystemExit with code 128 + number, and SIGINT raises KeyboardInterrupt."""

    def leave(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    with restored_handlers(*SIGNALS):
        install(leave)
        yield


def install(handler: Callable[[int, FrameType | None], None]) -> None:
    """Installs a handler for `SIGNALS`, except for SIGHUP where that is ignored, as after `nohup`. Main thread only."""
    if not _is_main_thread():
        return
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


@contextlib.contextmanager
def restored_handlers(*numbers: int) -> Iterator[Mapping[int, Any]]:
    """Restores the handlers of these signals after the block; yields them by signal number."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield before
    finally:
        if _is_main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class RunMonitor:
    """Polls a run several times a second, and never blocks for long.

    The two actors can be unavailable for a while, because Ray restarts them: calls to them are repeated.

    Args:
        event_writer, rendezvous: actor handles.
        viewer: receives each event.
        stop_request: whether to stop.
        stop_grace_s: time limit for a stop, in seconds.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        event_writer: Any,
        rendezvous: Any,
        viewer: Viewer,
        stop_request: StopRequest,
        stop_grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._event_writer, self._rendezvous, self._viewer, self._clock = event_writer, rendezvous, viewer, clock
        self._stop_request, self._stop_grace_s = stop_request, stop_grace_s
        self._stop_sent: float | None = None
        self.saved_step = 0
        """Finished steps of the newest checkpoint that was reported."""
        try:
            self._next: int = ray.get(event_writer.opened_at.remote(), timeout=START_LIMIT_S)
        except RayError as error:
            where, rule = EVENTS, f"the run's event log can be opened within {START_LIMIT_S:g} s"
            raise StorageError(where, error, rule, "check the storage and start again") from error
        self._pending, self._next_poll = self._fetch(), 0.0

    def emit(self, event: Event) -> None:
        """Appends an event to the run's log, asynchronously."""
        self._event_writer.append.remote([event])

    def poll(self) -> None:
        """Shows new events and forwards a stop request. Raises StopTimeout if a stop takes too long."""
        if self._clock() >= self._next_poll and ray.wait([self._pending[1]], timeout=0)[0]:
            self._show(*self._pending)
            self._pending = self._fetch()
            self._next_poll = self._clock() + POLL_EVERY_S
        self._viewer.tick(time.time())
        if self._stop_request.signal is not None:
            self._send_stop()
        if self._stop_request.waited_s > self._stop_grace_s:
            raise StopTimeout(f"the workers did not finish a step and save it within {self._stop_grace_s:g} s")

    def finish(self, ended: RunEnded) -> None:
        """Shows the remaining events and the end of the run, also after a second signal interrupted `poll` anywhere.

        If the event log is unreachable, the viewer still gets the end of the run.
        """
        self.emit(ended)
        is_shown = self._show(*self._pending, END_LIMIT_S) and self._show(*self._fetch(), END_LIMIT_S)
        with contextlib.suppress(RayError):
            ray.get(self._event_writer.close.remote(), timeout=END_LIMIT_S if is_shown else 0.1)
        if not is_shown:
            self._viewer.on_events([ended])

    def _send_stop(self) -> None:
        now = self._clock()
        if self._stop_sent is None or now - self._stop_sent > STOP_AGAIN_S:
            self._stop_sent = now
            self._rendezvous.stop.remote()

    def _fetch(self) -> tuple[int, Any]:
        """Requests the events from number `_next` on; returns that number and the object reference."""
        return self._next, self._event_writer.since.remote(self._next)

    def _show(self, first: int, reply: Any, limit_s: float = 1.0) -> bool:
        """Shows the events of a reply; returns False if there is none within `limit_s`."""
        try:
            events: list[Event] = ray.get(reply, timeout=limit_s)[self._next - first :]
        except RayError:
            return False
        self._next += len(events)
        if events:
            saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
            self.saved_step = max([self.saved_step, *saved])
            self._viewer.on_events(events)
        return True
