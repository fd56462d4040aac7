"""Ctrl-C and SIGTERM during a sweep: Ray Tune saves the sweep and ends it, when it is told so by a signal of its own.

Runs in the driver's main thread; elsewhere nothing is listened to.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

TOLD = signal.SIGUSR1
"""By which Ray Tune is told to end; while it runs it has a handler for it."""


class Interrupts:
    """Which signal came first.

    Args:
        before: who had the signal by which Ray Tune is told, before this sweep: an earlier one leaves its handler.
    """

    def __init__(self, before: Any) -> None:
        self.signal: int | None = None
        self._before = before

    def listen(self) -> None:
        """Takes SIGINT and SIGTERM over, also again from whoever took them since; only the main thread can."""
        if _is_main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.on_signal)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal ends the sweep in order; a second one, or one before it runs, is a KeyboardInterrupt."""
        is_first, self.signal = self.signal is None, self.signal or number
        handler = signal.getsignal(TOLD)
        if is_first and callable(handler) and handler is not self._before:
            signal.raise_signal(TOLD)
        else:
            raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Listens for as long as the block lasts."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, TOLD)}
    try:
        yield Interrupts(before[TOLD])
    finally:
        if _is_main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
