"""How does a thread draw items ahead of their use, but not too far ahead?

A daemon thread draws from an iterator and keeps a bounded number of items ready; an exception of the iterator is raised
where the item is wanted. `OnDemand` has the same methods and no thread. Knows nothing about data. Runs in the worker.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")


class _End:
    """The end of an iterator; as a context, catches the exception that ended it, since a thread has no caller."""

    error: BaseException | None = None

    def __enter__(self) -> _End:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        self.error = error
        return True


class Prefetcher(Generic[Item]):
    """The items of an iterator, produced in a thread that is at most `depth` + 1 items ahead.

    Args:
        make: called in the thread; returns the iterator. If it has a `close`, as generators have, that is called there.
        depth: greatest number of finished items that wait.
        name: name of the thread.
    """

    def __init__(self, make: Callable[[], Iterator[Item]], depth: int, name: str = "raytrain-prefetch") -> None:
        self._make = make
        self._ready: queue.Queue[Item | _End] = queue.Queue(maxsize=depth)
        self._closed = False
        self._end: _End | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def next(self) -> Item | None:
        """Waits for the next item; None after the last one. Raises what the iterator raised."""
        if self._end is None:
            item = self._ready.get()
            if not isinstance(item, _End):
                return item
            self._end = item
        if self._end.error is not None:
            raise self._end.error
        return None

    def close(self) -> None:
        """Stops the thread after the item that it is producing, without waiting for it. Idempotent."""
        self._closed = True
        while True:  # makes room, in case the thread waits for it
            try:
                self._ready.get_nowait()
            except queue.Empty:
                break
        if self._end is None:
            self._end = _End()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to end; returns whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with _End() as end:
            self._draw()
        if not self._closed:
            self._ready.put(end)

    def _draw(self) -> None:
        items = self._make()
        try:
            for item in items:
                if self._closed:
                    return
                self._ready.put(item)
                del item  # else it stays in memory while the next one is produced
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()


class OnDemand(Generic[Item]):
    """The items of an iterator, each produced when it is wanted, in the thread that wants it.

    Args:
        make: returns the iterator, a generator.
    """

    def __init__(self, make: Callable[[], Iterator[Item]]) -> None:
        self._items = make()

    def next(self) -> Item | None:
        """Produces the next item; None after the last one."""
        return next(self._items, None)

    def close(self) -> None:
        """Ends the iterator. Idempotent."""
        self._items = iter(())
