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

    def listen(self) -> None:
        """Takes SIGINT and SIGTERM over, also again from whoever took them since; only the main thread can."""
        if _is_main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.on_signal)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal is a wish; a second one ends the run where it stands, as a KeyboardInterrupt."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal, self._since = number, self._clock()


@contextlib.contextmanager
def listen() -> Iterator[StopWish]:
    """Listens to SIGINT and SIGTERM for as long as the block lasts; only the main thread can."""
    wish = StopWish()
    with _put_back(signal.SIGINT, signal.SIGTERM):
        wish.listen()
        yield wish


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the process by SystemExit, with code 143, where nobody listens otherwise."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    with _put_back(signal.SIGTERM):
        if _is_main_thread():
            signal.signal(signal.SIGTERM, leave)
        yield


@contextlib.contextmanager
def _put_back(*numbers: int) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if _is_main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
