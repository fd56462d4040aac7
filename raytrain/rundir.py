"""Where are the files of a run? In `<storage>/<name>/`, on any filesystem that pyarrow supports.

Holds paths and the few operations that all users of a run directory share; the content of the files is defined elsewhere.
Each call of the storage has a time limit, since a storage such as a network disk may never answer. Runs in every process.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote

from pyarrow import fs

from raytrain.timeout import CallTimeout, call_within

ANSWER_LIMIT_S = 30.0
"""How long the storage may take to answer a call; more for one that moves many bytes."""
SLOWEST_BYTES_PER_S = 1 << 20
BLOCK_BYTES = 16 << 20

CHECKPOINTS = "checkpoints"
EVENTS = "events.jsonl"
RUN = "run.json"


@dataclass(frozen=True)
class RunDir:
    """The directory of one run.

    Args:
        filesystem: the filesystem, with time limits.
        path: the path on it, without a scheme.
        is_local: whether it is this machine's own filesystem.
    """

    filesystem: Any
    path: str
    is_local: bool

    @classmethod
    def at(cls, storage: str, name: str) -> RunDir:
        """The directory of run `name` in `storage`, which is a path (made absolute) or a URI.

        Raises:
            ValueError, OSError: the URI is invalid, or its storage does not answer.
        """
        if is_uri(storage):
            filesystem, root = within(ANSWER_LIMIT_S, storage, fs.FileSystem.from_uri, storage)
        else:
            filesystem, root = fs.LocalFileSystem(), str(Path(local_path(storage)).expanduser().absolute())
        is_local = isinstance(filesystem, fs.LocalFileSystem)
        return cls(TimedFileSystem(filesystem), f"{root.rstrip('/')}/{name}", is_local)

    def child(self, *names: str) -> str:
        return "/".join([self.path, *names])

    def exists(self, *names: str) -> bool:
        return bool(self.filesystem.get_file_info(self.child(*names)).type != fs.FileType.NotFound)

    def read_json(self, *names: str) -> Any:
        """Raises FileNotFoundError if there is no such file, ValueError if it is not JSON."""
        with self.filesystem.open_input_stream(self.child(*names)) as stream:
            return json.loads(stream.read())

    def write_json(self, value: Any, *names: str, default: Callable[[Any], Any] | None = None) -> None:
        """Writes the file atomically, as far as the filesystem can rename files; also if the machine fails at this moment.

        Args:
            value: plain values.
            names: path of the file below this directory.
            default: converts values that JSON does not support, as in `json.dumps`.
        """
        self.filesystem.create_dir(self.child(*names[:-1]), recursive=True)
        data = json.dumps(value, indent=1, default=default).encode()
        target = self.child(*names)
        if not self.is_local:  # object stores make a file visible only when it is complete
            self._write(target, data)
            return
        self._write(f"{target}.new", data)
        within(ANSWER_LIMIT_S, f"fsync of {target}", _flush, f"{target}.new")
        self.filesystem.move(f"{target}.new", target)

    def _write(self, path: str, data: bytes) -> None:
        with self.filesystem.open_output_stream(path) as stream:
            stream.write(data)


def _flush(path: str) -> None:
    """Puts a file's content on the disk, since a rename may get there before it."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def is_uri(storage: str) -> bool:
    """Whether a storage is a URI of another filesystem than the local one."""
    return "://" in storage and not storage.startswith("file:")


def local_path(storage: str) -> str:
    """The path of a file URI, quoted or not: 'file:///my%20runs' and 'file:///my runs' -> '/my runs'; a path as it is.

    Raises:
        ValueError: the URI has no absolute path.
    """
    if not storage.startswith("file:"):
        return storage
    path = unquote(storage.removeprefix("file:").removeprefix("//"))
    if not path.startswith("/"):
        raise ValueError("file:// is followed by an absolute path, as in file:///mnt/runs")
    return path


class NoAnswer(OSError):
    """The storage did not answer in time."""


def within(limit_s: float, what: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a call of the storage returns or raises, if it does so in time.

    Args:
        limit_s: the time limit in seconds.
        what: is called, for the error.
        call: with its arguments.

    Raises:
        NoAnswer: it is still running.
    """
    try:
        return call_within(limit_s, call, *args, **options)
    except CallTimeout:
        raise NoAnswer(errno.ETIMEDOUT, f"the storage has not answered for {limit_s:.1f} s: {what}") from None


@dataclass(frozen=True)
class TimedFileSystem:
    """A filesystem of pyarrow of which each call, also on the files that it opens, raises `NoAnswer` after `limit_s`."""

    inner: Any
    limit_s: float = ANSWER_LIMIT_S

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        function = getattr(self.inner, name)
        if not callable(function):
            return function

        def call(target: Any, *args: Any, **options: Any) -> Any:
            path = target.base_dir if isinstance(target, fs.FileSelector) else target
            result = within(self.limit_s, f"{name} of {path}", function, target, *args, **options)
            return TimedFile(result, path, self.limit_s) if name.startswith("open_") else result

        return call


class TimedFile:
    """An open file of a `TimedFileSystem`; large reads and writes are done in blocks, each with a time limit."""

    def __init__(self, inner: Any, path: str, limit_s: float) -> None:
        self._inner, self._path, self._limit_s, self._written_bytes = inner, path, limit_s, 0

    def read(self, size: int | None = None) -> bytes:
        if size is not None:
            data: bytes = self._within(size, "read", size)
            return data
        blocks = iter(lambda: self.read(BLOCK_BYTES), b"")
        return b"".join(blocks)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        for start in range(0, len(view), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            self._within(len(block), "write", block)
            self._written_bytes += len(block)

    def close(self) -> None:
        self._within(self._written_bytes, "close")  # an object store may write all of it now

    def __enter__(self) -> TimedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, NoAnswer):
            self.close()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        return (lambda *args: self._within(0, name, *args)) if callable(attribute) else attribute

    def _within(self, num_bytes: int, name: str, *args: Any) -> Any:
        limit_s = self._limit_s + num_bytes / SLOWEST_BYTES_PER_S
        return within(limit_s, f"{name} of {self._path}", getattr(self._inner, name), *args)
