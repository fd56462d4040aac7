"""How does a thread work ahead of another one, but not too far?

Draws items from an iterator in a daemon thread and keeps a bounded number of them ready. It knows nothing of data.
Runs in the worker; an exception of the iterator is raised where the item is wanted.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")


class _Failure:
    """Catches what ends the thread, to raise it in the other one; a thread has no caller that could see it."""

    error: BaseException | None = None

    def __enter__(self) -> _Failure:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        self.error = error
        return True


class Ahead(Generic[Item]):
    """The items of an iterator, made in a thread that is at most `depth` + 1 items ahead.

    Args:
        make: called in the thread; returns the iterator. If it has a `close`, as generators have, that is called there.
        depth: finished items that may wait.
        name: name of the thread.
    """

    def __init__(self, make: Callable[[], Iterator[Item]], depth: int, name: str = "raytrain-feed") -> None:
        self._make = make
        self._ready: queue.Queue[Item | _Failure] = queue.Queue(maxsize=depth)
        self._closed = False
        self._end: _Failure | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def next(self) -> Item | None:
        """The next item, waiting for it; None after the last one. Raises what the iterator raised."""
        if self._end is None:
            item = self._ready.get()
            if not isinstance(item, _Failure):
                return item
            self._end = item
        if self._end.error is not None:
            raise self._end.error
        return None

    def close(self) -> None:
        """Tells the thread to stop after the item it is making, and does not wait for it. May be called twice."""
        self._closed = True
        while True:  # makes room, in case the thread waits for it
            try:
                self._ready.get_nowait()
            except queue.Empty:
                break
        if self._end is None:
            self._end = _Failure()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread's end; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with _Failure() as failure:
            self._draw()
        if not self._closed:
            self._ready.put(failure)

    def _draw(self) -> None:
        items = self._make()
        try:
            for item in items:
                if self._closed:
                    return
                self._ready.put(item)
                del item  # else a block stays in memory while the next one is made
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()
