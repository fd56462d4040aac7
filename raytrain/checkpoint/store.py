"""How are checkpoints written and verified? First the files, last the manifest with their digests.

A directory without a valid manifest, or with files that do not match it, is not a checkpoint. Storage errors are retried.
Runs in rank 0's process (the saver thread writes) and in the driver (which selects the checkpoint to resume from). Does
not know the content of the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from json import JSONDecodeError
from typing import Any, TypeVar

from pyarrow import fs
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from raytrain.checkpoint.manifest import Checkpoint, FileEntry, Manifest, Skipped, directory_name, parse_name
from raytrain.errors import CheckpointError, ResumeError, StorageError
from raytrain.rundir import ANSWER_LIMIT_S, BLOCK_BYTES, CHECKPOINTS, NoAnswer, RunDir, within

MANIFEST = "manifest.json"
PINS = "pins.json"
"""In the run's directory: names of checkpoints that other runs refer to."""
ATTEMPTS = 3
FIRST_PAUSE_S = 0.5  # before the second attempt; doubles with each one

Listing = list[Checkpoint]
T = TypeVar("T")


class CheckpointStore:
    """The checkpoints of one run, on any filesystem that pyarrow supports. One writer at a time.

    Storage errors are retried, except for a storage that did not answer for so long that nobody would wait again.

    Args:
        run_dir: the run's directory.
        sleep: sleeps for a number of seconds between two attempts.
        clock: Unix time in seconds.
        on_block: called after each block of a file that was read.
    """

    def __init__(
        self,
        run_dir: RunDir,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
        on_block: Callable[[], None] = lambda: None,
    ) -> None:
        self._dir, self._fs, self._clock, self._on_block = run_dir, run_dir.filesystem, clock, on_block
        self._retry = Retrying(
            retry=retry_if_exception(_may_pass),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential(FIRST_PAUSE_S),
            sleep=sleep,
            reraise=True,
        )
        self.skipped: tuple[Skipped, ...] = ()
        """Directories that the latest `list` or `newest_verified` skipped."""

    def write(
        self, step: int, files: Mapping[str, bytes | memoryview], metrics: Mapping[str, float], run: Mapping[str, Any]
    ) -> Checkpoint:
        """Writes a checkpoint to a new directory.

        Raises:
            CheckpointError: all attempts failed; partial files are deleted, or have no manifest.
        """
        name = ""
        try:
            name = self._retry(lambda: self._claim(step))
            entries = {file: self._retry(partial(self._write_file, name, file, files[file])) for file in files}
            manifest = Manifest(step=step, created=self._clock(), files=entries, metrics=metrics, run=run)
            value = manifest.to_json()
            self._retry(lambda: self._dir.write_json(value, CHECKPOINTS, name, MANIFEST))
        except OSError as error:
            path, tries = self._path(name or directory_name(step, 1)), f" in {ATTEMPTS} attempts"
            if isinstance(error, NoAnswer):
                tries = ""
            else:
                self._discard(name)
            raise CheckpointError(f"{path} could not be written{tries}: {error}") from error
        return Checkpoint(name, step, Manifest.from_json(value))

    def set_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of these weights to the newest checkpoint of `step`, if there is one without them.

        Raises:
            CheckpointError: all attempts to write failed.
            StorageError: as `list`.
        """
        found = [checkpoint for checkpoint in self.list() if checkpoint.step == step]
        if not found or found[-1].manifest.metrics:
            return
        name, value = found[-1].name, replace(found[-1].manifest, metrics=metrics).to_json()
        try:
            self._retry(lambda: self._dir.write_json(value, CHECKPOINTS, name, MANIFEST))
        except OSError as error:
            raise CheckpointError(f"the metrics of {self._path(name)} could not be written: {error}") from error

    def list(self) -> Listing:
        """The complete checkpoints, oldest first. Checks file sizes, but not digests. Sets `skipped`.

        Raises:
            StorageError: the storage cannot be read.
        """
        opened = [self._open(name) for name in self._names()]
        self.skipped = tuple(entry for entry in opened if isinstance(entry, Skipped))
        return [entry for entry in opened if isinstance(entry, Checkpoint)]

    def newest_verified(self) -> Checkpoint | None:
        """The newest checkpoint with correct digests, or None. Sets `skipped`.

        Raises:
            StorageError: as `list`.
        """
        for checkpoint in reversed(self.list()):
            reason = self._damage(checkpoint)
            if not reason:
                return checkpoint
            self.skipped += (Skipped(checkpoint.name, reason),)
        return None

    def to_resume(self) -> tuple[Checkpoint | None, tuple[Skipped, ...]]:
        """The checkpoint from which the run goes on, and the damaged ones after it, newest first; None if there is none.

        Raises:
            ResumeError: there are checkpoints, and all of them are damaged.
            StorageError: as `list`.
        """
        found = self.newest_verified()
        order = {one: parse_name(one.name) or (0, 0) for one in self.skipped if not one.is_leftover}
        newer = [one for one in order if found is None or order[one] > found.order]
        damaged = tuple(sorted(newer, key=order.__getitem__, reverse=True))
        if found is None and damaged:
            raise ResumeError(
                self._path(),
                "\n         ".join(f"{one.name}: {one.reason}" for one in damaged),
                "one of a run's checkpoints is whole, since a run does not begin anew beside what it has saved",
                "restore one of them, or begin anew with run.resume new and another run.name",
            )
        return found, damaged

    def pin(self, names: Sequence[str]) -> None:
        """Protects exactly these checkpoints from retention. Raises OSError if the storage fails."""
        self._retry(lambda: self._dir.write_json(list(names), PINS))

    def pinned(self) -> frozenset[str]:
        """The names of the last `pin`; empty if the file is damaged. Raises StorageError as `list`."""
        try:
            return frozenset(self._read(self._dir.child(PINS), lambda: self._dir.read_json(PINS)))
        except (FileNotFoundError, JSONDecodeError, UnicodeDecodeError):
            return frozenset()

    def read(self, checkpoint: Checkpoint, name: str) -> bytes:
        """The content of one file, with its digest verified.

        Raises:
            CheckpointError: the checkpoint has no such file, or its digest is wrong.
            StorageError: the storage cannot be read.
        """
        entry = checkpoint.manifest.files.get(name)
        path = self._path(checkpoint.name, name)
        if entry is None:
            raise CheckpointError(f"{path}: the checkpoint has only {', '.join(checkpoint.manifest.files)}")
        try:
            data = self._read(path, lambda: b"".join(self._blocks(path)))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise CheckpointError(f"{path} is damaged: its SHA-256 differs from the manifest's")
        return data

    def delete(self, checkpoint: Checkpoint) -> None:
        """Deletes a checkpoint, the manifest first, so that a partial deletion is not a checkpoint.

        Raises:
            CheckpointError: the deletion failed.
        """
        self._remove(checkpoint.name, MANIFEST)

    def delete_incomplete(self) -> tuple[Skipped, ...]:
        """Deletes directories without a manifest and returns them. Call it only while nothing is being written.

        Keeps directories with a damaged manifest or damaged files, because their content may still be useful.

        Raises:
            CheckpointError: a deletion failed.
            StorageError: as `list`.
        """
        self.list()
        leftovers = tuple(skipped for skipped in self.skipped if skipped.is_leftover)
        for leftover in leftovers:
            self._remove(leftover.name)
        return leftovers

    def _claim(self, step: int) -> str:
        """Creates a directory that no other attempt at this step has used."""
        taken = {info.base_name for info in self._infos(self._path())}
        name = next(name for name in (directory_name(step, n) for n in count(1)) if name not in taken)
        if self._dir.is_local:  # atomic, also against a writer that is wrongly believed dead
            within(ANSWER_LIMIT_S, self._path(), os.makedirs, self._path(), exist_ok=True)
            within(ANSWER_LIMIT_S, self._path(name), os.mkdir, self._path(name))
        else:
            self._fs.create_dir(self._path(name), recursive=True)
        return name

    def _read(self, path: str, action: Callable[[], T]) -> T:
        """Calls `action`, which reads `path`, with retries.

        Raises:
            FileNotFoundError: the file does not exist.
            StorageError: any other storage error.
        """
        try:
            return self._retry(action)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageError(path, error, "the run's storage can be read", "check the storage and start again") from error

    def _write_file(self, directory: str, name: str, data: bytes | memoryview) -> FileEntry:
        digest, view = hashlib.sha256(), memoryview(data).cast("B")
        with self._fs.open_output_stream(self._path(directory, name)) as stream:
            for start in range(0, len(view), BLOCK_BYTES):
                block = view[start : start + BLOCK_BYTES]
                digest.update(block)
                stream.write(block)
        return FileEntry(len(view), digest.hexdigest())

    def _names(self) -> Sequence[str]:
        infos = self._read(self._path(), lambda: self._infos(self._path()))
        names = [info.base_name for info in infos if info.type == fs.FileType.Directory and parse_name(info.base_name)]
        return sorted(names, key=lambda name: parse_name(name) or (0, 0))

    def _open(self, name: str) -> Checkpoint | Skipped:
        """The checkpoint in a directory, or the reason why it is not one."""
        path = self._path(name)
        try:
            manifest = Manifest.from_json(self._read(path, lambda: self._dir.read_json(CHECKPOINTS, name, MANIFEST)))
        except FileNotFoundError:
            return Skipped(name, "it has no manifest: it was never finished", is_leftover=True)
        except (JSONDecodeError, UnicodeDecodeError) as error:
            return Skipped(name, f"the manifest is not JSON: {error}")
        except CheckpointError as error:
            return Skipped(name, str(error))
        sizes = {info.base_name: info.size for info in self._read(path, lambda: self._infos(path))}
        for file, entry in manifest.files.items():
            if sizes.get(file) != entry.size_bytes:
                have = f"{sizes[file]} bytes" if file in sizes else "missing"
                return Skipped(name, f"{file} is {have}, the manifest says {entry.size_bytes} bytes")
        return Checkpoint(name, manifest.step, manifest)

    def _damage(self, checkpoint: Checkpoint) -> str:
        """The first damage of a checkpoint's files; empty if there is none. Holds one block in memory."""
        for file, entry in checkpoint.manifest.files.items():
            path = self._path(checkpoint.name, file)
            try:
                digest = self._read(path, partial(self._digest, path))
            except FileNotFoundError:
                return f"{file} is missing"
            if digest != entry.sha256:
                return f"{file} is damaged: its SHA-256 differs from the manifest's"
        return ""

    def _digest(self, path: str) -> str:
        digest = hashlib.sha256()
        for block in self._blocks(path):
            digest.update(block)
        return digest.hexdigest()

    def _blocks(self, path: str) -> Iterator[bytes]:
        with self._fs.open_input_stream(path) as stream:
            while block := stream.read(BLOCK_BYTES):
                self._on_block()
                yield block

    def _infos(self, path: str) -> Sequence[Any]:
        return tuple(self._fs.get_file_info(fs.FileSelector(path, allow_not_found=True)))

    def _remove(self, name: str, *first: str) -> None:
        """Deletes a directory, the files `first` before the others."""
        try:
            for path in (self._path(name, file) for file in first):
                with contextlib.suppress(FileNotFoundError):
                    self._retry(partial(self._fs.delete_file, path))
            with contextlib.suppress(FileNotFoundError):
                self._retry(lambda: self._fs.delete_dir(self._path(name)))
        except OSError as error:
            raise CheckpointError(f"{self._path(name)} could not be deleted: {error}") from error

    def _discard(self, name: str) -> None:
        """Deletes a failed attempt if the storage allows it; without a manifest it is harmless."""
        if name:
            with contextlib.suppress(OSError):
                self._fs.delete_dir(self._path(name))

    def _path(self, *names: str) -> str:
        return self._dir.child(CHECKPOINTS, *[name for name in names if name])


def _may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed in a moment."""
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError | NoAnswer)
