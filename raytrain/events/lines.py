"""How is the log stored? As lines that are appended to a local file, or as an object that is rewritten.

A line is an event as JSON, with its delivery if its sender numbers what it sends. Nothing here knows what an event means.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pyarrow import fs

from raytrain.events.kinds import Event, from_json
from raytrain.rundir import EVENTS, RunDir

REWRITE_S = 10.0
"""Minimum time between two writes to an object store, which cannot append: each one writes the whole object."""
DELIVERY = "delivery"
"""Key of a line with the sender of its event and the event's number there, "3f9a01c2d4e5:17"; not part of the event."""


def parse_line(line: bytes) -> Event | None:
    """The event of one line, or None if the line is incomplete or of an unknown version."""
    return parse_delivered(line)[0]


def parse_delivered(line: bytes) -> tuple[Event | None, str]:
    """The event of `parse_line`, and its delivery or ""."""
    try:
        value = json.loads(line)
        return (from_json(value), str(value.get(DELIVERY, ""))) if isinstance(value, dict) else (None, "")
    except (ValueError, TypeError, KeyError):
        return None, ""


class LogFile(Protocol):
    @property
    def is_written(self) -> bool:
        """Whether all lines are on the storage."""

    def add(self, lines: bytes) -> None: ...

    def write(self, at_once: bool = False) -> None: ...

    def take_others(self) -> bytes: ...

    def close(self) -> None: ...


class LocalFile:
    """Appends to a local file, resuming after partial writes. Other processes may append whole lines to it."""

    def __init__(self, run_dir: RunDir) -> None:
        path = Path(run_dir.child(EVENTS))
        path.parent.mkdir(parents=True, exist_ok=True)
        _repair(path)
        self._file = path.open("a+b", buffering=0)
        self._waiting, self._others = b"", b""
        self._known_bytes = self._size_bytes()
        """Bytes from the start that this object wrote or read."""

    @property
    def is_written(self) -> bool:
        return not self._waiting

    def add(self, lines: bytes) -> None:
        self._waiting += lines

    def write(self, at_once: bool = False) -> None:
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


class ObjectFile:
    """Keeps the whole text and rewrites the object. No other process can append to an object."""

    def __init__(self, run_dir: RunDir, clock: Callable[[], float]) -> None:
        self._run_dir, self._clock = run_dir, clock
        self._text = bytearray(_whole_lines(run_dir))
        self._unwritten = False
        self._next_write = clock()

    @property
    def is_written(self) -> bool:
        return not self._unwritten

    def add(self, lines: bytes) -> None:
        self._text += lines
        self._unwritten = self._unwritten or bool(lines)

    def write(self, at_once: bool = False) -> None:
        if self._unwritten and (at_once or self._clock() >= self._next_write):
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
