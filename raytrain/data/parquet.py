"""Parquet files as a source of rows: which rows there are is known from the footers, values are read when taken.

A chunk is a row group. Mistakes that footers show are found when the source is built, in the driver; all others when
the rows are read, in the workers or in Ray Data's processes. Each error names the file or the column.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import fs

from raytrain.data.parquet_columns import Column, Unfit, choose_columns, decode, key_values
from raytrain.data.parquet_files import Footer, find_files, read_footers, unreadable
from raytrain.data.source import Columns
from raytrain.errors import DataError

KEPT_GROUPS = 2  # decoded row groups that are kept, since neighbouring logical workers may share one
KEPT_FOOTERS = 64


class ParquetSource:
    """Rows of Parquet files, file after file; see `parquet`.

    Attributes:
        left_out: columns that are not read, with the reason, because they cannot become tensors.
    """

    def __init__(self, filesystem: fs.FileSystem, footers: Sequence[Footer], columns: Sequence[str] | None) -> None:
        full = [footer for footer in footers if footer.num_rows]
        if not full:
            found = f"0 rows in {len(footers)} files, such as {footers[0].file.path}"
            raise DataError("data", found, "data have a row at least", "correct the path given to parquet()")
        self._filesystem = filesystem
        self._columns, self.left_out = choose_columns(full, columns)
        self._files = [footer.file for footer in full]
        self._keys = {
            column.name: np.array([key_values(footer, column.name) for footer in full])
            for column in self._columns
            if column.is_key
        }
        groups = [(i, g, rows) for i, f in enumerate(full) for g, rows in enumerate(f.group_rows) if rows]
        self._groups = np.array(groups, dtype=np.int64)  # [chunks, 3]: file, row group in the file, rows
        self._ends = np.cumsum(self._groups[:, 2])
        self._digest = _digest(full, self._columns)
        _check_nulls(full, self._columns)
        self._start_cache()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._shapes = self._row_shapes()
        _check_lengths(full, self._shapes)

    @property
    def num_rows(self) -> int:
        return int(self._ends[-1])

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        return tuple(self._groups[:, 2].tolist())

    @property
    def columns(self) -> Sequence[str]:
        return tuple(column.name for column in self._columns)

    def take(self, rows: NDArray[np.int64]) -> Columns:
        """The rows with these numbers, in this order; reads each row group that they are in once.

        Raises:
            DataError: a file is damaged, or a column has nulls or rows of different shapes.
        """
        taken = {c.name: np.empty((len(rows), *self._shapes[c.name]), c.dtype) for c in self._columns}
        groups = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(groups, kind="stable")
        for chunk, places in _runs(groups, order):
            inside = rows[places] - (self._ends[chunk] - self._groups[chunk, 2])
            for name, values in self._group(chunk).items():
                taken[name][places] = values[inside]
            for name, values in self._keys.items():
                taken[name][places] = values[self._groups[chunk, 0]]
        return taken

    def fingerprint(self) -> dict[str, Any]:
        """Totals, and a digest over names and sizes of files, rows of row groups, and columns with their types."""
        return {
            "kind": "parquet",
            "files": len(self._files),
            "rows": self.num_rows,
            "bytes": sum(file.size_bytes for file in self._files),
            "columns": ", ".join(f"{c.name}: {c.dtype} {list(self._shapes[c.name])}" for c in self._columns),
            "digest": self._digest,
        }

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_kept", "_footers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start_cache()

    def _start_cache(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Columns] = OrderedDict()
        self._footers: OrderedDict[int, Any] = OrderedDict()

    def _group(self, chunk: int) -> Columns:
        """A decoded row group, of the columns that are in the file."""
        with self._lock:
            if chunk in self._kept:
                self._kept.move_to_end(chunk)
                return self._kept[chunk]
        made = {}
        for column, values in self._read(chunk):
            shape = self._shapes[column.name]
            if values.shape[1:] != shape:
                rule = f"has one shape in all files: {list(shape)}, as in its first row"
                raise self._error(chunk, column.name, f"rows of shape {list(values.shape[1:])}", rule, "pad or cut them")
            made[column.name] = values.astype(column.dtype, copy=False)
        with self._lock:
            self._kept[chunk] = made
            while len(self._kept) > KEPT_GROUPS:
                self._kept.popitem(last=False)
        return made

    def _read(self, chunk: int, only: Sequence[str] | None = None) -> Iterator[tuple[Column, NDArray[Any]]]:
        index, group, _ = self._groups[chunk].tolist()
        wanted = [c for c in self._columns if not c.is_key and (only is None or c.name in only)]
        with self._lock:
            footer = self._footers.get(index)
        try:
            with self._filesystem.open_input_file(self._files[index].path) as stream:
                file = pq.ParquetFile(stream, metadata=footer, pre_buffer=True)
                table = file.read_row_group(group, columns=[column.name for column in wanted])
        except (pa.ArrowInvalid, OSError) as error:
            raise unreadable(self._files[index], error) from error
        with self._lock:
            self._footers[index] = file.metadata
            while len(self._footers) > KEPT_FOOTERS:
                self._footers.popitem(last=False)
        for column in wanted:
            try:
                yield column, decode(table.column(column.name))
            except Unfit as unfit:
                raise self._error(chunk, column.name, *unfit.args) from None

    def _row_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of a row of each column. Footers do not tell it for lists, so the first row group is read for them."""
        lists = [column.name for column in self._columns if column.is_list]
        found = {column.name: values.shape[1:] for column, values in (self._read(0, lists) if lists else ())}
        return {column.name: found.get(column.name, ()) for column in self._columns}

    def _error(self, chunk: int, name: str, value: str, rule: str, fix: str) -> DataError:
        index, group, _ = self._groups[chunk].tolist()
        return DataError(f"data, column {name!r} of {self._files[index].path}, row group {group}", value, rule, fix)


def parquet(
    paths: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    columns: Sequence[str] | None = None,
    filesystem: fs.FileSystem | None = None,
) -> ParquetSource:
    """A source over Parquet files.

    Args:
        paths: a path or URI, or a list of them: files, directories (all *.parquet below them) or local globs.
        columns: names of the columns to read; by default all whose values are numbers, booleans or lists of them.
            Partition keys in paths (year=2024) are int64 columns if all their values are whole numbers.
        filesystem: where the paths lie, if they are not local paths and no URIs.

    Raises:
        DataError: something is missing, empty or damaged, or a column cannot become tensors; see its text.
    """
    filesystem, files = find_files(paths, filesystem)
    return ParquetSource(filesystem, read_footers(filesystem, files), columns)


def _runs(groups: NDArray[np.int64], order: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each row group with the places of its rows in the request."""
    cuts = np.flatnonzero(np.diff(groups[order])) + 1
    for places in np.split(order, cuts):
        if len(places):
            yield int(groups[places[0]]), places


def _check_nulls(footers: Sequence[Footer], columns: Sequence[Column]) -> None:
    """Lists are not checked here, since footers count empty lists as nulls."""
    for footer in footers:
        for column in columns:
            count = 0 if column.is_list else footer.num_nulls.get(column.name)
            if count:
                where = f"data, column {column.name!r} of {footer.file.path}"
                raise DataError(where, f"{count} nulls", "has no nulls", "fill the nulls, or drop those rows")


def _check_lengths(footers: Sequence[Footer], shapes: dict[str, tuple[int, ...]]) -> None:
    """Finds lists of other lengths than the first row's by the number of values, before they are read."""
    for footer in footers:
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            for group, rows in enumerate(footer.group_rows if shape and size else ()):
                if footer.num_values[name][group] != rows * size:
                    where = f"data, column {name!r} of {footer.file.path}, row group {group}"
                    found = f"{footer.num_values[name][group]} values in {rows} rows"
                    rule = f"all rows have the shape of the first one, {list(shape)}"
                    raise DataError(where, found, rule, "pad or cut the lists")


def _digest(footers: Sequence[Footer], columns: Sequence[Column]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file, rows in ((footer.file, footer.group_rows) for footer in footers):
        digest.update(repr((file.name, file.size_bytes, rows)).encode())
    digest.update(repr([(column.name, str(column.dtype)) for column in columns]).encode())
    return digest.hexdigest()
