"""Ctrl-C and SIGTERM as a wish that the run stops at its next step boundary, with a limit in time.

Signals reach the driver only: Ray's processes, the workers among them, do not hear the terminal's Ctrl-C.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType


class StopWish:
    """Whether, by which signal, and since when somebody wants the run to end.

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

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal is a wish; a second one ends the run where it stands, as a KeyboardInterrupt."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal, self._since = number, self._clock()


@contextlib.contextmanager
def listen() -> Iterator[StopWish]:
    """Listens to SIGINT and SIGTERM for as long as the block lasts; only the main thread can."""
    wish = StopWish()
    with _handled(wish.on_signal, signal.SIGINT, signal.SIGTERM):
        yield wish


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the process by SystemExit, with code 143, where nobody listens otherwise."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    with _handled(leave, signal.SIGTERM):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
