"""Filesystems that fail on purpose, for the tests of the store, the saver and the run directory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyarrow import fs

from raytrain.checkpoint.store import CheckpointStore
from raytrain.rundir import RunDir, TimedFileSystem

FILES = {"model.safetensors": b"weights" * 1000, "state.pt": b"the rest" * 100}


class Killed(BaseException):
    """Simulates the death of the process: no handler of the package may catch it."""


class FaultyFilesystem:
    """The local filesystem with a hook before each operation, which can raise."""

    def __init__(self, before: Callable[[str, str], None]) -> None:
        self._inner, self._before = fs.LocalFileSystem(), before

    def __getattr__(self, operation: str) -> Any:
        function = getattr(self._inner, operation)

        def call(target: Any, *args: Any, **options: Any) -> Any:
            path = target.base_dir if isinstance(target, fs.FileSelector) else target
            self._before(operation, str(path))
            result = function(target, *args, **options)
            return Stream(result, lambda: self._before("write", path)) if operation == "open_output_stream" else result

        return call


class Stream:
    """An output stream with the hook in each write, after half of its bytes."""

    def __init__(self, inner: Any, before: Callable[[], None]) -> None:
        self._inner, self._before = inner, before

    def write(self, data: Any) -> None:
        half = len(data) // 2
        self._inner.write(memoryview(data)[:half])
        self._before()
        self._inner.write(memoryview(data)[half:])

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._inner.close()


class FirstFail:
    """Raises OSError at the first `times` calls of an operation on paths that end with `suffix`."""

    def __init__(self, operation: str, times: int, suffix: str = "", error: OSError | None = None) -> None:
        self.operation, self.left, self.suffix = operation, times, suffix
        self.error = error or OSError(5, "Input/output error")

    def __call__(self, operation: str, path: str) -> None:
        if operation == self.operation and path.endswith(self.suffix) and self.left > 0:
            self.left -= 1
            raise self.error


class Hang:
    """The first call of an operation on a path that ends with `suffix` returns only once the test is `over`."""

    def __init__(self, operation: str, suffix: str = "") -> None:
        self.operation, self.suffix, self.over, self.has_begun = operation, suffix, threading.Event(), False

    def __call__(self, operation: str, path: str) -> None:
        if operation == self.operation and path.endswith(self.suffix) and not self.has_begun:
            self.has_begun = True
            self.over.wait(60)

    def run_dir(self, path: Path) -> RunDir:
        return RunDir(TimedFileSystem(FaultyFilesystem(self), limit_s=0.2), str(path), is_local=True)


class KillAt:
    """Raises Killed at the n-th operation and at all later ones."""

    def __init__(self, n: int) -> None:
        self.left, self.fired = n, False

    def __call__(self, operation: str, path: str) -> None:
        self.left -= 1
        if self.left < 0:
            self.fired = True
            raise Killed


def store_at(
    path: Path,
    before: Callable[[str, str], None] = lambda operation, path: None,
    is_local: bool = False,
    sleep: Callable[[float], None] = lambda seconds: None,
) -> CheckpointStore:
    """A store that does not really sleep; with `is_local` False it behaves as on an object store."""
    return CheckpointStore(RunDir(FaultyFilesystem(before), str(path), is_local), sleep=sleep)
