"""Ctrl-C and SIGTERM during a sweep: Ray Tune saves the sweep and ends it at SIGINT, so SIGTERM becomes one.

Runs in the driver's main thread; elsewhere nothing is listened to.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Which signal came first."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def listen(self) -> None:
        """Takes SIGTERM over, also again from whoever took it since, and SIGINT as far as Ray Tune leaves it."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)
            signal.signal(signal.SIGINT, self._on_interrupt)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        signal.raise_signal(signal.SIGINT)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Listens for as long as the block lasts."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    interrupts = Interrupts()
    try:
        yield interrupts
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
