"""Where checkpoints lie and how they become complete: every file first, the manifest with their digests last.

A directory without a valid manifest, or whose files do not match it, is no checkpoint. Runs in rank 0's process (the
saver's thread writes) and in the driver (which chooses what to resume from). It does not know what is in the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from json import JSONDecodeError
from typing import Any

from pyarrow import fs

from raytrain.checkpoint.manifest import Checkpoint, FileEntry, Manifest, Skipped, directory_name, parse_name
from raytrain.checkpoint.retries import ATTEMPTS, Retries
from raytrain.errors import CheckpointError
from raytrain.rundir import CHECKPOINTS, RunDir

MANIFEST = "manifest.json"
PINS = "pins.json"
"""In the run's directory: names of checkpoints to which somebody else refers."""
BLOCK_BYTES = 16 << 20

Listing = list[Checkpoint]


class CheckpointStore:
    """The checkpoints of one run, on any filesystem that pyarrow knows. One writer at a time.

    Args:
        run_dir: the run's directory.
        sleep: waits for that many seconds before an attempt is repeated.
        clock: Unix time in seconds.
    """

    def __init__(
        self, run_dir: RunDir, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.time
    ) -> None:
        self._dir, self._fs, self._retries, self._clock = run_dir, run_dir.filesystem, Retries(sleep), clock
        self.skipped: tuple[Skipped, ...] = ()
        """What the latest `list` or `newest_verified` passed over."""

    def write(
        self, step: int, files: Mapping[str, bytes | memoryview], metrics: Mapping[str, float], run: Mapping[str, Any]
    ) -> Checkpoint:
        """Writes a checkpoint into a directory of its own.

        Raises:
            CheckpointError: three attempts failed; what was written of it is gone, or has no manifest.
        """
        name = ""
        try:
            name = self._retries.run(lambda: self._claim(step))
            entries = {file: self._retries.run(partial(self._write_file, name, file, files[file])) for file in files}
            manifest = Manifest(step=step, created=self._clock(), files=entries, metrics=metrics, run=run)
            value = manifest.to_json()
            self._retries.run(lambda: self._dir.write_json(value, CHECKPOINTS, name, MANIFEST))
        except OSError as error:
            self._discard(name)
            path = self._path(name or directory_name(step, 1))
            raise CheckpointError(f"{path} could not be written in {ATTEMPTS} attempts: {error}") from error
        return Checkpoint(name, step, Manifest.from_json(value))

    def list(self) -> Listing:
        """The complete checkpoints, oldest first; sizes are checked, digests are not. Sets `skipped`.

        Raises:
            StorageError: the storage cannot be read, so what is there is unknown.
        """
        opened = [self._open(name) for name in self._names()]
        self.skipped = tuple(entry for entry in opened if isinstance(entry, Skipped))
        return [entry for entry in opened if isinstance(entry, Checkpoint)]

    def newest_verified(self) -> Checkpoint | None:
        """The newest checkpoint whose digests are right, None if there is none. `skipped` says what was passed over.

        Raises:
            StorageError: as `list`.
        """
        for checkpoint in reversed(self.list()):
            reason = self._damage(checkpoint)
            if not reason:
                return checkpoint
            self.skipped += (Skipped(checkpoint.name, reason),)
        return None

    def pin(self, names: Sequence[str]) -> None:
        """Keeps checkpoints of these names from being deleted as old ones, and no others. Raises OSError as storage does."""
        self._retries.run(lambda: self._dir.write_json(list(names), PINS))

    def pinned(self) -> frozenset[str]:
        """The names that were given to `pin` last, none where that is damaged. Raises StorageError as `list` does."""
        try:
            return frozenset(self._retries.read(self._dir.child(PINS), lambda: self._dir.read_json(PINS)))
        except (FileNotFoundError, JSONDecodeError, UnicodeDecodeError):
            return frozenset()

    def read(self, checkpoint: Checkpoint, name: str) -> bytes:
        """The content of one file, as it was written.

        Raises:
            CheckpointError: the checkpoint has no such file, or it is not what was written.
            StorageError: the storage cannot be read.
        """
        entry = checkpoint.manifest.files.get(name)
        path = self._path(checkpoint.name, name)
        if entry is None:
            raise CheckpointError(f"{path}: the checkpoint has only {', '.join(checkpoint.manifest.files)}")
        try:
            data = self._retries.read(path, lambda: b"".join(self._blocks(path)))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise CheckpointError(f"{path} is not what was written: its SHA-256 differs from the manifest's")
        return data

    def delete(self, checkpoint: Checkpoint) -> None:
        """Deletes a checkpoint: the manifest first, so that half of it is never taken for a whole.

        Raises:
            CheckpointError: it could not be deleted.
        """
        self._remove(checkpoint.name, MANIFEST)

    def delete_incomplete(self) -> tuple[Skipped, ...]:
        """Deletes directories without a manifest and returns them. Only while nobody writes: before a run, or between saves.

        A directory with a damaged manifest or damaged files stays, since a person may still want what is in it.

        Raises:
            CheckpointError: one could not be deleted.
            StorageError: as `list`.
        """
        self.list()
        leftovers = tuple(skipped for skipped in self.skipped if skipped.is_leftover)
        for leftover in leftovers:
            self._remove(leftover.name)
        return leftovers

    def _claim(self, step: int) -> str:
        """A directory that no other attempt at this step has used, made."""
        taken = {info.base_name for info in self._infos(self._path())}
        name = next(name for name in (directory_name(step, n) for n in count(1)) if name not in taken)
        if self._dir.is_local:  # where it can be told, also against a writer that is believed dead and is not
            os.makedirs(self._path(), exist_ok=True)
            os.mkdir(self._path(name))
        else:
            self._fs.create_dir(self._path(name), recursive=True)
        return name

    def _write_file(self, directory: str, name: str, data: bytes | memoryview) -> FileEntry:
        digest, view = hashlib.sha256(), memoryview(data).cast("B")
        with self._fs.open_output_stream(self._path(directory, name)) as stream:
            for start in range(0, len(view), BLOCK_BYTES):
                block = view[start : start + BLOCK_BYTES]
                digest.update(block)
                stream.write(block)
        return FileEntry(len(view), digest.hexdigest())

    def _names(self) -> Sequence[str]:
        infos = self._retries.read(self._path(), lambda: self._infos(self._path()))
        names = [info.base_name for info in infos if info.type == fs.FileType.Directory and parse_name(info.base_name)]
        return sorted(names, key=lambda name: parse_name(name) or (0, 0))

    def _open(self, name: str) -> Checkpoint | Skipped:
        """The checkpoint in a directory, or why it is none."""
        path = self._path(name)
        try:
            manifest = Manifest.from_json(self._retries.read(path, lambda: self._dir.read_json(CHECKPOINTS, name, MANIFEST)))
        except FileNotFoundError:
            return Skipped(name, "it has no manifest: it was never finished", is_leftover=True)
        except (JSONDecodeError, UnicodeDecodeError) as error:
            return Skipped(name, f"the manifest is not JSON: {error}")
        except CheckpointError as error:
            return Skipped(name, str(error))
        sizes = {info.base_name: info.size for info in self._retries.read(path, lambda: self._infos(path))}
        for file, entry in manifest.files.items():
            if sizes.get(file) != entry.size_bytes:
                have = f"{sizes[file]} bytes" if file in sizes else "missing"
                return Skipped(name, f"{file} is {have}, the manifest says {entry.size_bytes} bytes")
        return Checkpoint(name, manifest.step, manifest)

    def _damage(self, checkpoint: Checkpoint) -> str:
        """What is wrong with the files of a checkpoint; empty if nothing is. Holds one block in memory."""
        for file, entry in checkpoint.manifest.files.items():
            path = self._path(checkpoint.name, file)
            try:
                digest = self._retries.read(path, partial(self._digest, path))
            except FileNotFoundError:
                return f"{file} is missing"
            if digest != entry.sha256:
                return f"{file} is not what was written: its SHA-256 differs from the manifest's"
        return ""

    def _digest(self, path: str) -> str:
        digest = hashlib.sha256()
        for block in self._blocks(path):
            digest.update(block)
        return digest.hexdigest()

    def _blocks(self, path: str) -> Iterator[bytes]:
        with self._fs.open_input_stream(path) as stream:
            while block := stream.read(BLOCK_BYTES):
                yield block

    def _infos(self, path: str) -> Sequence[Any]:
        return tuple(self._fs.get_file_info(fs.FileSelector(path, allow_not_found=True)))

    def _remove(self, name: str, *first: str) -> None:
        """Deletes a directory, some of its files before the others."""
        try:
            for path in (self._path(name, file) for file in first):
                with contextlib.suppress(FileNotFoundError):
                    self._retries.run(partial(self._fs.delete_file, path))
            with contextlib.suppress(FileNotFoundError):
                self._retries.run(lambda: self._fs.delete_dir(self._path(name)))
        except OSError as error:
            raise CheckpointError(f"{self._path(name)} could not be deleted: {error}") from error

    def _discard(self, name: str) -> None:
        """Tidies up after a failed attempt, as far as the storage lets it: without a manifest it is harmless."""
        if name:
            with contextlib.suppress(OSError):
                self._fs.delete_dir(self._path(name))

    def _path(self, *names: str) -> str:
        return self._dir.child(CHECKPOINTS, *[name for name in names if name])
