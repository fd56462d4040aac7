"""Where are data that have to be converted to Parquet before workers can read them by row number, and are they up to date?

Below the storage of the runs, in `.data/<key>/`: a Parquet file, and `manifest.json`, which is written last. The key follows
from names, sizes and times of the original files and from how they are read, so that each version of them is converted once,
and by whichever run comes first. Runs in the driver.
"""

from __future__ import annotations

import hashlib
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from raytrain.data.arrow import digest_of
from raytrain.data.parquet import Pad, ParquetSource
from raytrain.data.parquet_footers import File, Footer, read_footers
from raytrain.errors import DataError, StorageError
from raytrain.rundir import RunDir
from raytrain.units import format_bytes, format_count, format_seconds

DIRECTORY, MANIFEST = ".data", "manifest.json"
LAYOUT = 1  # raised when the same files would be converted to other rows
GROUP_ROWS, GROUP_BYTES = 8192, 4 * 2**20  # of a row group at most; rows are shuffled by row groups

Facts = dict[str, Any]
"""Plain values that a conversion finds out: `left_out`, and what `fingerprint` tells besides the rows."""
Tables = Generator[pa.Table, None, Facts]


class _Target(NamedTuple):
    storage: str
    say: Callable[[str], None]


_target: ContextVar[_Target | None] = ContextVar("_target", default=None)


@contextmanager
def converting_to(storage: str, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, data are converted to this storage; elsewhere, to ./runs.

    Args:
        storage: path or URI of the storage of the runs.
        say: is told what is converted.
    """
    token = _target.set(_Target(storage, say))
    try:
        yield
    finally:
        _target.reset(token)


class ConvertedSource(ParquetSource):
    """Rows of a converted file; the fingerprint is that of its values, which converting again does not change.

    Args:
        facts: of the manifest.
    """

    def __init__(self, filesystem: fs.FileSystem, footers: Sequence[Footer], facts: Facts, pad: Pad | None = None) -> None:
        super().__init__(filesystem, footers, None, pad)
        self.left_out = facts["left_out"]
        self._facts = {name: value for name, value in facts.items() if name not in ("left_out", "file")}

    def fingerprint(self) -> dict[str, Any]:
        """What was converted, number of rows, dtypes and shapes of columns, and a digest of all values."""
        described = super().fingerprint()
        return self._facts | {name: described[name] for name in ("rows", "columns")}


def converted(
    title: str,
    files: Sequence[File],
    filesystem: fs.FileSystem,
    options: Mapping[str, Any],
    convert: Callable[[], Tables],
    pad: Pad | None = None,
) -> ConvertedSource:
    """The source over converted files; converts them if no earlier call did.

    Args:
        title: what they are, such as "CSV".
        files: the files.
        filesystem: where they are.
        options: plain values that tell how they are read.
        convert: yields their rows in order, and returns the facts.
        pad: as in `parquet`.

    Raises:
        DataError: they cannot be converted.
        StorageError: the storage cannot be written.
    """
    target = _target.get() or _Target("./runs", _to_stderr)
    key = hashlib.blake2b(repr((LAYOUT, title, sorted(options.items()), list(files))).encode(), digest_size=12).hexdigest()
    place = RunDir.at(target.storage, f"{DIRECTORY}/{key}")
    facts = _read_manifest(place)
    if facts is None:
        size = format_bytes(sum(file.size_bytes for file in files))
        many = f"{len(files)} {title} file{'s' if len(files) > 1 else ''}"
        target.say(f"converting {many} ({size}) to Parquet, once, in {place.path}")
        started = time.monotonic()
        facts = _write(place, title, convert)
        _check_unchanged(filesystem, files)
        place.write_json(facts, MANIFEST)
        took = format_seconds(time.monotonic() - started)
        target.say(f"converted {format_count(facts['rows'])} rows in {took}" + "".join(f"; {n}" for n in facts["notes"]))
    stored = place.filesystem.inner
    path = place.child(facts["file"])
    footers = read_footers(stored, [File(path, facts["file"], stored.get_file_info(path).size)])
    return ConvertedSource(stored, footers, {k: v for k, v in facts.items() if k not in ("rows", "notes")}, pad)


def _read_manifest(place: RunDir) -> Facts | None:
    """The facts of a complete conversion; None if there is none."""
    with _storage_errors(place):
        try:
            facts: Facts = place.read_json(MANIFEST)
        except (FileNotFoundError, ValueError):
            return None
        return facts if place.exists(facts["file"]) else None


def _write(place: RunDir, title: str, convert: Callable[[], Tables]) -> Facts:
    """Writes a Parquet file with a name of its own, since another driver may convert the same files at this time."""
    name, stored = f"{uuid.uuid4().hex[:12]}.parquet", place.filesystem.inner
    with _storage_errors(place):
        stored.create_dir(place.path, recursive=True)
        stream = stored.open_output_stream(place.child(name))
    with ExitStack() as undo:
        undo.callback(stored.delete_file, place.child(name))
        facts = _write_tables(place, stream, convert())
        undo.pop_all()
    return {"kind": title, "file": name} | facts


def _write_tables(place: RunDir, stream: Any, tables: Tables) -> Facts:
    digest, num_rows = hashlib.blake2b(digest_size=16), 0
    facts: Facts = {}

    def whole() -> Iterator[pa.Table]:
        facts.update((yield from tables))

    writer: pq.ParquetWriter | None = None
    with stream:
        for table in whole():
            with _storage_errors(place):
                writer = writer or pq.ParquetWriter(stream, table.schema)
                per_group = GROUP_BYTES * table.num_rows // max(table.nbytes, 1)
                writer.write_table(table, row_group_size=min(max(per_group, 1), GROUP_ROWS))
            digest.update(digest_of(table).encode())
            num_rows += table.num_rows
        with _storage_errors(place):
            if writer is not None:
                writer.close()
            stream.close()
    return {"rows": num_rows, "notes": [], "left_out": {}, "digest": digest.hexdigest()} | facts


@contextmanager
def _storage_errors(place: RunDir) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        rule, fix = "the storage of the runs is writable and has room for converted data", "set run.storage to one that is"
        raise StorageError(f"storage {place.path}", str(error), rule, fix) from error


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201


def _check_unchanged(filesystem: fs.FileSystem, files: Sequence[File]) -> None:
    for file, now in zip(files, filesystem.get_file_info([file.path for file in files]), strict=True):
        if (now.size or 0, now.mtime_ns or 0) != (file.size_bytes, file.mtime_ns):
            found = f"changed while it was converted: {file.size_bytes} bytes before, {now.size} after"
            raise DataError(f"data, file {file.path}", found, "is complete before the run starts", "start again when it is")
