"""How are rows of Parquet files read, one row group after the other?

The footers tell which rows there are; values are read when taken. A chunk is a row group. Errors that footers show are
raised when the source is built, in the driver; all others when rows are read, in workers or in Ray Data's processes.
Each error names the file or the column.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import fs

from raytrain.data.parquet_footers import (
    LIST_TYPES,
    Column,
    Footer,
    check_lengths,
    check_nulls,
    choose_columns,
    find_files,
    key_value,
    read_footers,
    unreadable,
)
from raytrain.data.source import NO_NULLS, Columns, Seed
from raytrain.errors import DataError

CACHED_GROUPS = 2  # decoded row groups, since neighbouring logical workers may share one
CACHED_FOOTERS = 64

Value = TypeVar("Value")


class _Cache(Generic[Value]):
    """The most recently used values by number, for any thread; empty after pickling."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._values: OrderedDict[int, Value] = OrderedDict()

    def get(self, key: int, make: Callable[[], Value]) -> Value:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            self._values[key] = value
            while len(self._values) > self._size:
                self._values.popitem(last=False)
        return value

    def __reduce__(self) -> Any:
        return _Cache, (self._size,)


class _Unfit(Exception):
    """A column cannot be decoded, since it has nulls or rows of different shapes.

    Args:
        found: what is wrong.
        row: the first row, from the start of the row group, where it is.
        remedy: the rule and the fix.
    """

    def __init__(self, found: str, row: int, remedy: tuple[str, str]) -> None:
        super().__init__(found, row, remedy)
        self.found, self.row, self.remedy = found, row, remedy


class ParquetSource:
    """Rows of Parquet files, file after file; see `parquet`.

    Attributes:
        left_out: for each column that cannot become a tensor, and is not read, the reason.
    """

    runs_user_code = False

    def __init__(self, filesystem: fs.FileSystem, footers: Sequence[Footer], columns: Sequence[str] | None) -> None:
        full = [footer for footer in footers if footer.num_rows]
        if not full:
            found = f"0 rows in {len(footers)} files, such as {footers[0].file.path}"
            raise DataError("data", found, "the dataset must not be empty", "correct the path given to parquet()")
        self._filesystem = filesystem
        self._columns, left_out = choose_columns(full, columns)
        self.left_out: Mapping[str, str] = left_out
        self._files = [footer.file for footer in full]
        self._keys = {
            column.name: np.array([key_value(footer, column.name) for footer in full])
            for column in self._columns
            if column.is_key
        }
        groups = [(i, g, rows) for i, f in enumerate(full) for g, rows in enumerate(f.group_rows) if rows]
        self._groups = np.array(groups, dtype=np.int64)  # [chunks, 3]: file, row group in the file, rows
        self._ends = np.cumsum(self._groups[:, 2])
        self._digest = _digest(full, self._columns)
        check_nulls(full, self._columns)
        self._cached_groups: _Cache[Columns] = _Cache(CACHED_GROUPS)
        self._cached_footers: _Cache[Any] = _Cache(CACHED_FOOTERS)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._shapes = self._row_shapes()
        check_lengths(full, self._shapes)

    @property
    def num_rows(self) -> int:
        return int(self._ends[-1])

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        return tuple(self._groups[:, 2].tolist())

    @property
    def columns(self) -> Sequence[str]:
        return tuple(column.name for column in self._columns)

    def take(self, row_ids: NDArray[np.int64], seed: Seed = (0, 0)) -> Columns:
        """The rows with these ids, in this order; reads each of their row groups once.

        Raises:
            DataError: a file is damaged, or a column has nulls or rows of different shapes.
        """
        taken = {c.name: np.empty((len(row_ids), *self._shapes[c.name]), c.dtype) for c in self._columns}
        groups = np.searchsorted(self._ends, row_ids, side="right")
        order = np.argsort(groups, kind="stable")
        for chunk, positions in _runs(groups, order):
            inside = row_ids[positions] - (self._ends[chunk] - self._groups[chunk, 2])
            for name, values in self._group(chunk).items():
                taken[name][positions] = values[inside]
            for name, values in self._keys.items():
                taken[name][positions] = values[self._groups[chunk, 0]]
        return taken

    def fingerprint(self) -> dict[str, Any]:
        """Totals, and a digest of file names and sizes, rows per row group, and columns with their dtypes."""
        return {
            "kind": "parquet",
            "files": len(self._files),
            "rows": self.num_rows,
            "bytes": sum(file.size_bytes for file in self._files),
            "columns": ", ".join(f"{c.name}: {c.dtype} {list(self._shapes[c.name])}" for c in self._columns),
            "digest": self._digest,
        }

    def _group(self, chunk: int) -> Columns:
        """A decoded row group, of the columns that are in the file."""

        def read() -> Columns:
            decoded = {}
            for column, values in self._read(chunk):
                shape = self._shapes[column.name]
                if values.shape[1:] != shape:
                    rule = f"has one shape in all files: {list(shape)}, as in its first row"
                    found = f"rows of shape {list(values.shape[1:])}"
                    raise self._error(chunk, column.name, found, rule, "pad or cut them")
                decoded[column.name] = values
            return decoded

        return self._cached_groups.get(chunk, read)

    def _read(self, chunk: int, only: Sequence[str] | None = None) -> Iterator[tuple[Column, NDArray[Any]]]:
        index, group, _ = self._groups[chunk].tolist()
        wanted = [c for c in self._columns if not c.is_key and (only is None or c.name in only)]
        try:
            with self._filesystem.open_input_file(self._files[index].path) as stream:
                metadata = self._cached_footers.get(index, lambda: pq.read_metadata(stream))
                file = pq.ParquetFile(stream, metadata=metadata, pre_buffer=True)
                table = file.read_row_group(group, columns=[column.name for column in wanted])
        except (pa.ArrowInvalid, OSError) as error:
            raise unreadable(self._files[index], error) from error
        for column in wanted:
            try:
                yield column, _decode_column(table.column(column.name))
            except _Unfit as unfit:
                found = f"{unfit.found}, first in row {unfit.row} of the row group"
                raise self._error(chunk, column.name, found, *unfit.remedy) from None

    def _row_shapes(self) -> dict[str, tuple[int, ...]]:
        """The row shape of each column; for lists, which footers do not tell, from the first row group."""
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
        columns: names of the columns to read; by default all with numbers, booleans or lists of them.
            Partition keys in paths (year=2024) are int64 columns if all their values are whole numbers.
        filesystem: filesystem of the paths, if they are neither local nor URIs.

    Raises:
        DataError: a path is missing, a file is damaged, there are no rows, or a column cannot become a tensor.
    """
    filesystem, files = find_files(paths, filesystem)
    return ParquetSource(filesystem, read_footers(filesystem, files), columns)


def _runs(groups: NDArray[np.int64], order: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each row group with the positions of its rows in the request."""
    cuts = np.flatnonzero(np.diff(groups[order])) + 1
    for positions in np.split(order, cuts):
        if len(positions):
            yield int(groups[positions[0]]), positions


def _decode_column(column: pa.ChunkedArray) -> NDArray[Any]:
    """An Arrow column as numpy, of shape [rows, ...]; may share its memory. Raises _Unfit."""
    if column.null_count:
        raise _Unfit(f"{column.null_count} nulls", _first(column.is_null()), NO_NULLS)
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return _decode(array)


def _decode(array: pa.Array) -> NDArray[Any]:
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return np.asarray(array.to_numpy_ndarray())
    if pa.types.is_dictionary(kind):
        return _decode(array.dictionary_decode())
    if array.null_count:
        raise _Unfit(f"{array.null_count} nulls inside of lists", _first(array.is_null()), NO_NULLS)
    if not isinstance(kind, LIST_TYPES):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    length = kind.list_size if pa.types.is_fixed_size_list(kind) else _common_length(array)
    try:
        inner = _decode(array.flatten())
    except _Unfit as unfit:
        raise _Unfit(unfit.found, unfit.row // length, unfit.remedy) from None
    return inner.reshape(len(array), length, *inner.shape[1:])


def _common_length(array: pa.Array) -> int:
    lengths = pc.list_value_length(array)
    bounds = pc.min_max(lengths).as_py()
    if bounds["min"] != bounds["max"]:
        found, rule = f"lists of {bounds['min']} to {bounds['max']} values", "all lists of a column have the same length"
        raise _Unfit(found, _first(pc.not_equal(lengths, lengths[0])), (rule, "pad or cut the lists"))
    return int(bounds["max"] or 0)


def _first(mask: pa.Array) -> int:
    """The first row where a mask is true."""
    return int(pc.index(mask, True).as_py())


def _digest(footers: Sequence[Footer], columns: Sequence[Column]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file, rows in ((footer.file, footer.group_rows) for footer in footers):
        digest.update(repr((file.name, file.size_bytes, rows)).encode())
    digest.update(repr([(column.name, str(column.dtype)) for column in columns]).encode())
    return digest.hexdigest()
