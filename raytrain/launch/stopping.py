"""Ctrl-C and SIGTERM as a wish that the run stops at its next step boundary, with a limit in time."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType


class StopWish:
    """Whether, by which signal, and since when somebody wants the run to end."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds since the first signal; 0 before."""
        return time.monotonic() - self._since if self.signal else 0.0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal is a wish; a second one ends the driver where it stands."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal, self._since = number, time.monotonic()


@contextlib.contextmanager
def listen() -> Iterator[StopWish]:
    """Listens to SIGINT and SIGTERM for as long as the block lasts; only the main thread can."""
    wish = StopWish()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    before = {number: signal.signal(number, wish.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
