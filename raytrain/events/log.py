"""Where are the events of a run kept? In `events.jsonl` of its directory, one line each, only ever added to.

`EventLog` writes them and runs in one actor beside the driver; `read` is for viewers, in any process, also while the
run goes on. A step is written once, however often a worker sends it. Nothing here decides what an event means for a
viewer; that is `view`.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pyarrow import fs

from raytrain.events.kinds import Event, StateRestored, StepsDone, from_json, to_json
from raytrain.rundir import EVENTS, RunDir

REWRITE_S = 10.0  # an object store cannot append: the whole object is written again, at most this often


class EventLog:
    """The events of a run, numbered from 0 through the whole file.

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
        self._steps = _RecordedSteps(self._events)
        self._sink: _Sink = _LocalSink(run_dir) if run_dir.is_local else _ObjectSink(run_dir, clock)
        self.opened_at = len(self._events)
        """How many events there were before this process: the number of the first one that it appends."""
        self.failure: OSError | None = None
        """Why the newest lines are not in the file yet; None if they are."""

    def append(self, events: Iterable[Event]) -> None:
        """Adds events, with the time where it is missing, without the steps that were recorded before."""
        new = [_timed(kept, self._clock()) for event in events for kept in self._steps.only_new(event)]
        self._sink.add("".join(json.dumps(to_json(event)) + "\n" for event in new).encode())
        self._events.extend(map(_without_rows, new))
        self._try(self._sink.write)

    def since(self, number: int) -> list[Event]:
        """Events `number`, `number + 1`, ..., without row ids; those before it are forgotten (one reader polls)."""
        self._try(self._sink.write)
        del self._events[: max(0, number - self._first_kept)]
        self._first_kept = max(self._first_kept, number)
        return list(self._events)

    def close(self) -> None:
        """Writes what is left; raises OSError if that fails."""
        self._sink.close()
        self.failure = None

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


class _RecordedSteps:
    """Which steps are in the log: all below a height, and perhaps some beyond a gap.

    A gap can arise from a message of a worker that died: what it sent arrives late, or never. Since a step is the same
    whoever reports it, the first report counts.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self._height = 0
        self._beyond: set[int] = set()
        for event in events:
            self.only_new(event)

    def only_new(self, event: Event) -> list[Event]:
        """The event, or the parts of it whose steps are not in the log; they are from now on."""
        if isinstance(event, StateRestored):
            self._height, self._beyond = event.step, set()
        if not isinstance(event, StepsDone):
            return [event]
        new = [i for i in range(len(event.losses)) if self._add(event.first_step + i)]
        if len(new) == len(event.losses):
            return [event] if new else []
        return [_cut(event, start, stop) for start, stop in _stretches(new)]

    def _add(self, step: int) -> bool:
        if step < self._height or step in self._beyond:
            return False
        self._beyond.add(step)
        while self._height in self._beyond:
            self._beyond.remove(self._height)
            self._height += 1
        return True


def _stretches(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """[0, 1, 4] -> (0, 2), (4, 5)."""
    first = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[first], numbers[i - 1] + 1
            first = i


def _cut(event: StepsDone, start: int, stop: int) -> StepsDone:
    names = ("losses", "weights", "rows", "learning_rates", "finished", "data_waits", "row_ids")
    lists: dict[str, Any] = {name: getattr(event, name) for name in names}
    parts = {name: values and values[start:stop] for name, values in lists.items()}
    return replace(event, first_step=event.first_step + start, **parts)


class _Sink(Protocol):
    def add(self, lines: bytes) -> None: ...

    def write(self) -> None: ...

    def close(self) -> None: ...


class _LocalSink:
    """Appends to a file; a write that was cut short goes on where it ended."""

    def __init__(self, run_dir: RunDir) -> None:
        path = Path(run_dir.child(EVENTS))
        path.parent.mkdir(parents=True, exist_ok=True)
        _mend(path)
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def add(self, lines: bytes) -> None:
        self._waiting += lines

    def write(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) or 0 :]

    def close(self) -> None:
        self.write()
        self._file.close()


class _ObjectSink:
    """Keeps the text and writes the object anew."""

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
