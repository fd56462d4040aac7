"""Where are the events of a run kept? In `events.jsonl` of its directory, one line each, only ever added to.

`EventLog` writes them and runs in one actor beside the driver; `read` is for viewers, in any process, also while the
run goes on. A step is written once, however often a worker sends it. Nothing here decides what an event means for a
viewer; that is `view`.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from pyarrow import fs

from raytrain.events.kinds import Event, StepsDone
from raytrain.events.recorded import RecordedSteps
from raytrain.events.values import from_json, to_json
from raytrain.rundir import EVENTS, RunDir

REWRITE_S = 10.0  # an object store cannot append: the whole object is written again, at most this often


class EventLog:
    """The events of a run, numbered from 0 through the whole file, those that others have added to it too.

    Args:
        run_dir: the run's directory, made if it is not there.
        clock: Unix time in seconds.

    A full disk or a passing fault of the store loses nothing: lines wait in memory and are tried again; `failure` says
    why, until they are written.
    """

    def __init__(self, run_dir: RunDir, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events = [_without_rows(event) for event in read(run_dir)]
        self._first_kept = 0
        self._steps = RecordedSteps(self._events)
        self._sink: _Sink = _LocalSink(run_dir) if run_dir.is_local else _ObjectSink(run_dir, clock)
        self.opened_at = len(self._events)
        """How many events there were before this process: the number of the first one that it appends."""
        self.failure: OSError | None = None
        """Why the newest lines are not in the file yet; None if they are."""

    def append(self, events: Iterable[Event]) -> None:
        """Adds events, with the time where it is missing, without the steps that were recorded before."""
        new = [_timed(kept, self._clock()) for event in events for kept in self._steps.only_new(event)]
        self._sink.add("".join(json.dumps(to_json(event)) + "\n" for event in new).encode())
        self._try(self._sink.write)
        self._take_others()
        self._events.extend(map(_without_rows, new))

    def since(self, number: int) -> list[Event]:
        """Events `number`, `number + 1`, ..., without row ids; those before it are forgotten (one reader polls)."""
        self._try(self._sink.write)
        self._take_others()
        del self._events[: max(0, number - self._first_kept)]
        self._first_kept = max(self._first_kept, number)
        return list(self._events)

    def close(self) -> None:
        """Writes what is left; raises OSError if that fails."""
        self._sink.close()
        self.failure = None

    def _take_others(self) -> None:
        found = map(parse_line, self._sink.take_others().split(b"\n"))
        self._events += [_without_rows(event) for event in found if event is not None]

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
            self.failure = None
        except OSError as error:
            self.failure = error


def read(run_dir: RunDir) -> Iterator[Event]:
    """The events of a run, oldest first; none if it has no log yet.

    Lines that this version does not know, and a last line that is still being written, are left out.
    """
    try:
        stream = run_dir.filesystem.open_input_stream(run_dir.child(EVENTS))
    except FileNotFoundError:
        return
    with io.BufferedReader(stream) as lines:
        for line in lines:
            event = parse_line(line)
            if event is not None:
                yield event


def parse_line(line: bytes) -> Event | None:
    """The event of a line of the log, or None for one that this version does not know, or that is not whole."""
    try:
        value = json.loads(line)
        return from_json(value) if isinstance(value, dict) else None
    except (ValueError, TypeError, KeyError):
        return None


def _timed(event: Event, now: float) -> Event:
    return event if event.time else replace(event, time=now)


def _without_rows(event: Event) -> Event:
    return replace(event, row_ids=None) if isinstance(event, StepsDone) and event.row_ids else event


class _Sink(Protocol):
    def add(self, lines: bytes) -> None: ...

    def write(self) -> None: ...

    def take_others(self) -> bytes: ...

    def close(self) -> None: ...


class _LocalSink:
    """Appends to a file; a write that was cut short goes on where it ended. Others may append whole lines to it."""

    def __init__(self, run_dir: RunDir) -> None:
        path = Path(run_dir.child(EVENTS))
        path.parent.mkdir(parents=True, exist_ok=True)
        _mend(path)
        self._file = path.open("a+b", buffering=0)
        self._waiting, self._others = b"", b""
        self._known_bytes = self._size_bytes()
        """Up to here the file is ours, or was read."""

    def add(self, lines: bytes) -> None:
        self._waiting += lines

    def write(self) -> None:
        self._read_up_to(self._size_bytes())
        while self._waiting:
            written = self._file.write(self._waiting) or 0
            self._waiting = self._waiting[written:]
            end = self._file.tell()  # the kernel appends: somebody else may have been quicker
            self._read_up_to(end - written)
            self._known_bytes = end

    def take_others(self) -> bytes:
        """Whole lines that others have added, in front of what was written last; each once."""
        end = self._others.rfind(b"\n") + 1
        lines, self._others = self._others[:end], self._others[end:]
        return lines

    def _read_up_to(self, end: int) -> None:
        if end > self._known_bytes:
            self._others += os.pread(self._file.fileno(), end - self._known_bytes, self._known_bytes)
            self._known_bytes = end

    def _size_bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self.write()
        self._file.close()


class _ObjectSink:
    """Keeps the text and writes the object anew. Nobody else can add to an object."""

    def __init__(self, run_dir: RunDir, clock: Callable[[], float]) -> None:
        self._run_dir, self._clock = run_dir, clock
        self._text = bytearray(_whole_lines(run_dir))
        self._unwritten = False
        self._next_write = clock()

    def add(self, lines: bytes) -> None:
        self._text += lines
        self._unwritten = self._unwritten or bool(lines)

    def write(self) -> None:
        if self._unwritten and self._clock() >= self._next_write:
            self._next_write = self._clock() + REWRITE_S  # also after a failure: a sick store is not asked all the time
            self._rewrite()

    def take_others(self) -> bytes:
        return b""

    def close(self) -> None:
        if self._unwritten:
            self._rewrite()

    def _rewrite(self) -> None:
        filesystem: fs.FileSystem = self._run_dir.filesystem
        filesystem.create_dir(self._run_dir.path, recursive=True)
        with filesystem.open_output_stream(self._run_dir.child(EVENTS)) as stream:
            stream.write(bytes(self._text))
        self._unwritten = False


def _mend(path: Path) -> None:
    """Ends a last line that a kill left without a newline: kept if it is whole, else cut off."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end, tail = _last_line(file, path.stat().st_size)
        if not tail:
            return
        if parse_line(tail) is not None:
            file.seek(0, io.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(end)


def _last_line(file: io.BufferedRandom, size: int, block: int = 1 << 16) -> tuple[int, bytes]:
    """Where the last whole line ends, and what follows it."""
    tail, start = b"", size
    while start > 0 and b"\n" not in tail:
        start = max(0, start - block)
        file.seek(start)
        tail = file.read(size - start)
    end = start + tail.rfind(b"\n") + 1
    return end, tail[end - start :]


def _whole_lines(run_dir: RunDir) -> bytes:
    if not run_dir.exists(EVENTS):
        return b""
    with run_dir.filesystem.open_input_stream(run_dir.child(EVENTS)) as stream:
        text: bytes = stream.read()
    return text if text.endswith(b"\n") or not text else text + b"\n"
