"""What the user's code prints in a worker, as events with the rank: whole lines, from any thread."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Callable, Iterator

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
        self._part = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._part = (self._part + text).split("\n")
        for line in lines:
            self._emit(Printed(rank=self._rank(), stream=self._stream, text=line.rpartition("\r")[2]))
        return len(text)

    def finish(self) -> None:
        """Tells a last line that has no newline."""
        if self._part:
            self.write("\n")


@contextlib.contextmanager
def told_as_events(rank: Callable[[], int], emit: Callable[[Event], None]) -> Iterator[None]:
    """Sends what is written to `sys.stdout` and `sys.stderr` through `emit`, for as long as the block lasts."""
    out, err = LineEvents("stdout", rank, emit), LineEvents("stderr", rank, emit)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            sys.stdout.flush()
            out.finish()
            err.finish()
