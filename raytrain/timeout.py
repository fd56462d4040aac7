"""How does a call that may never return get a time limit? It runs in a thread of its own, which is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any


class CallTimeout(Exception):
    """The call had not returned in time."""


class _Outcome:
    """What became of a block that runs in another thread: it ends, with or without an error."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        """Keeps the error for the thread that waits, which raises it."""
        self.error = error
        self.has_ended.set()
        return True


def call_within(limit_s: float, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What `call` returns or raises, if it does so in time.

    Args:
        limit_s: the time limit in seconds.
        call: with its arguments. Its thread does not keep the process from ending.

    Raises:
        CallTimeout: it is still running.
    """
    outcome = _Outcome()

    def run() -> None:
        with outcome:
            outcome.value = call(*args, **options)

    threading.Thread(target=run, name="call with a time limit", daemon=True).start()
    if not outcome.has_ended.wait(limit_s):
        raise CallTimeout
    error, outcome.error = outcome.error, None
    try:
        if error is not None:
            raise error
    finally:
        del error  # its traceback holds this frame, and what the callers hold, such as a process group
    return outcome.value
