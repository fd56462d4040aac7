"""Where are the events of a run stored? In `events.jsonl` of its directory, one line each, append-only.

`EventLog` writes the file; `EventWriter` is the same as a Ray actor on the driver's node. `read` is for viewers, in any
process, also during the run. Each step is written once, even if several workers report it. What an event means is
decided elsewhere (`view`, `goodput`, `curve`).
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pyarrow import fs

from raytrain.events.kinds import Event, StateRestored, StepsDone, from_json, to_json
from raytrain.rundir import EVENTS, RunDir

REWRITE_S = 10.0
"""Minimum time between two writes to an object store, which cannot append: each one writes the whole object."""


class EventLog:
    """The events of a run, numbered from 0 through the whole file, including lines that other processes append.

    A full disk or a transient storage error loses nothing: lines stay in memory and are retried; `failure` holds the
    error until they are written.

    Args:
        run_dir: the run's directory; created if missing.
        clock: Unix time in seconds.
    """

    def __init__(self, run_dir: RunDir, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events = [_without_rows(event) for event in read(run_dir)]
        self._first_kept = 0
        self._steps = _RecordedSteps(self._events)
        self._file: _LogFile = _LocalFile(run_dir) if run_dir.is_local else _ObjectFile(run_dir, clock)
        self.opened_at = len(self._events)
        """Number of events before this process, so the number of the first one that it appends."""
        self.failure: OSError | None = None
        """Why the newest lines are not written yet; None if they are."""

    def append(self, events: Iterable[Event]) -> None:
        """Appends events. Sets missing times, leaves out steps that are already recorded."""
        new = [_timed(kept, self._clock()) for event in events for kept in self._steps.only_new(event)]
        self._file.add("".join(json.dumps(to_json(event)) + "\n" for event in new).encode())
        self._try(self._file.write)
        self._take_others()
        self._events.extend(map(_without_rows, new))

    def since(self, number: int) -> list[Event]:
        """Events `number`, `number + 1`, ..., without row ids. Earlier ones are dropped from memory: there is one reader."""
        self._try(self._file.write)
        self._take_others()
        del self._events[: max(0, number - self._first_kept)]
        self._first_kept = max(self._first_kept, number)
        return list(self._events)

    def close(self) -> None:
        """Writes pending lines. Raises OSError if that fails."""
        self._file.close()
        self.failure = None

    def _take_others(self) -> None:
        found = map(parse_line, self._file.take_others().split(b"\n"))
        self._events += [_without_rows(event) for event in found if event is not None]

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
            self.failure = None
        except OSError as error:
            self.failure = error


class EventWriter:
    """The event log as a Ray actor: every process appends, the driver polls. Ray restarts it: its state is the file."""

    def __init__(self, storage: str, name: str) -> None:
        self._log = EventLog(RunDir.at(storage, name))

    def opened_at(self) -> int:
        """Number of events before this driver."""
        return self._log.opened_at

    def append(self, events: list[Event]) -> None:
        self._log.append(events)

    def since(self, number: int) -> list[Event]:
        return self._log.since(number)

    def close(self) -> None:
        self._log.close()


def read(run_dir: RunDir) -> Iterator[Event]:
    """The events of a run, oldest first; empty if it has no log yet.

    Skips lines of an unknown version and an incomplete last line.
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
    """The event of one line, or None if the line is incomplete or of an unknown version."""
    try:
        value = json.loads(line)
        return from_json(value) if isinstance(value, dict) else None
    except (ValueError, TypeError, KeyError):
        return None


def _timed(event: Event, now: float) -> Event:
    return event if event.time else replace(event, time=now)


def _without_rows(event: Event) -> Event:
    return replace(event, row_ids=None) if isinstance(event, StepsDone) and event.row_ids else event


class _RecordedSteps:
    """Which steps the log contains: all below `_height`, and possibly some beyond a gap.

    A gap occurs when the message of a failed worker arrives late or never. Every worker reports a step with the same
    values, so the first report is kept.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self._height = 0
        self._beyond: set[int] = set()
        for event in events:
            self.only_new(event)

    def only_new(self, event: Event) -> list[Event]:
        """The event, or its parts with steps that are not recorded yet. Marks them as recorded."""
        if isinstance(event, StateRestored):
            self._height, self._beyond = event.step, set()
        if not isinstance(event, StepsDone):
            return [event]
        new = [i for i in range(len(event.losses)) if self._add(event.first_step + i)]
        if len(new) == len(event.losses):
            return [event] if new else []
        return [_slice(event, start, stop) for start, stop in _ranges(new)]

    def _add(self, step: int) -> bool:
        if step < self._height or step in self._beyond:
            return False
        self._beyond.add(step)
        while self._height in self._beyond:
            self._beyond.remove(self._height)
            self._height += 1
        return True


def _ranges(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """[0, 1, 4] -> (0, 2), (4, 5)."""
    first = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[first], numbers[i - 1] + 1
            first = i


def _slice(event: StepsDone, start: int, stop: int) -> StepsDone:
    names = ("losses", "weights", "rows", "learning_rates", "finished", "data_waits", "row_ids")
    lists: dict[str, Any] = {name: getattr(event, name) for name in names}
    parts = {name: values and values[start:stop] for name, values in lists.items()}
    return replace(event, first_step=event.first_step + start, **parts)


class _LogFile(Protocol):
    def add(self, lines: bytes) -> None: ...

    def write(self) -> None: ...

    def take_others(self) -> bytes: ...

    def close(self) -> None: ...


class _LocalFile:
    """Appends to a local file, resuming after partial writes. Other processes may append whole lines to it."""

    def __init__(self, run_dir: RunDir) -> None:
        path = Path(run_dir.child(EVENTS))
        path.parent.mkdir(parents=True, exist_ok=True)
        _repair(path)
        self._file = path.open("a+b", buffering=0)
        self._waiting, self._others = b"", b""
        self._known_bytes = self._size_bytes()
        """Bytes from the start that this object wrote or read."""

    def add(self, lines: bytes) -> None:
        self._waiting += lines

    def write(self) -> None:
        self._read_up_to(self._size_bytes())
        while self._waiting:
            written = self._file.write(self._waiting) or 0
            self._waiting = self._waiting[written:]
            end = self._file.tell()  # O_APPEND: another process may have appended in between
            self._read_up_to(end - written)
            self._known_bytes = end

    def take_others(self) -> bytes:
        """Whole lines of other processes before the end of the last write, each returned once."""
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


class _ObjectFile:
    """Keeps the whole text and rewrites the object. No other process can append to an object."""

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
            self._next_write = self._clock() + REWRITE_S  # also after a failure, to not overload a failing store
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


def _repair(path: Path) -> None:
    """Repairs a last line without a newline, left by a kill: keeps it if it parses, else truncates it."""
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
    """Offset after the last complete line, and the bytes that follow."""
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
