"""What the user's code prints in a worker, as events with the rank: whole lines, from any thread."""

from __future__ import annotations

import builtins
import contextlib
import io
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from raytrain.events.kinds import Event, Printed


class LineEvents(io.TextIOBase):
    """A text stream that turns each whole line into a `Printed` event.

    Args:
        stream: "stdout" or "stderr".
        rank: tells the rank of this moment; it changes with the generation.
        emit: takes the events.
    """

    def __init__(self, stream: str, rank: Callable[[], int], emit: Callable[[Event], None]) -> None:
        self._stream, self._rank, self._emit = stream, rank, emit
        self._lock = threading.Lock()
        self._parts: dict[int, str] = {}
        """What each thread has written of its last line, by the thread's number."""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            *lines, part = (self._parts.pop(threading.get_ident(), "") + text).split("\n")
            if part:
                self._parts[threading.get_ident()] = part
        for line in lines:
            self._tell(line)
        return len(text)

    def finish(self) -> None:
        """Tells last lines that have no newline."""
        with self._lock:
            parts, self._parts = self._parts, {}
        for part in parts.values():
            self._tell(part)

    def _tell(self, line: str) -> None:
        """Of what was written over by carriage returns, as progress bars do, the last state is told."""
        self._emit(Printed(rank=self._rank(), stream=self._stream, text=line.rstrip("\r").rpartition("\r")[2]))


@contextlib.contextmanager
def told_as_events(rank: Callable[[], int], emit: Callable[[Event], None]) -> Iterator[None]:
    """Sends what is written to `sys.stdout` and `sys.stderr` through `emit`, for as long as the block lasts."""
    out, err = LineEvents("stdout", rank, emit), LineEvents("stderr", rank, emit)
    builtins.print, replaced = plain_print, builtins.print
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            builtins.print = replaced
            out.finish()
            err.finish()


def plain_print(
    *objects: Any, sep: str | None = None, end: str | None = None, file: Any = None, flush: bool = False
) -> None:
    """As Python's own, which Ray Train replaces in workers by one that also writes each line to its log."""
    stream = sys.stdout if file is None else file
    stream.write((" " if sep is None else sep).join(map(str, objects)) + ("\n" if end is None else end))
    if flush:
        stream.flush()
