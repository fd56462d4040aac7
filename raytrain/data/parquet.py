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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from os import PathLike
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import fs

from raytrain.data.arrow import PAD_OR_CUT, Unfit, combined, decode, lengths_of, padded, take_from_chunks, whole
from raytrain.data.parquet_footers import (
    FOOTER_THREADS,
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
from raytrain.data.source import Columns, Seed, left_out_column, missing_column
from raytrain.errors import DataError

CACHED_GROUPS = 2  # decoded row groups, since neighbouring logical workers may share one
CACHED_FOOTERS = 64

Pad = Mapping[str, float | tuple[float, int]]
"""For each column to pad, the value, or the value and the length."""

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


class ParquetSource:
    """Rows of Parquet files, file after file; see `parquet`.

    Attributes:
        left_out: for each column that cannot become a tensor, and is not read, the reason.
    """

    runs_user_code = decodes = False

    def __init__(
        self, filesystem: fs.FileSystem, footers: Sequence[Footer], columns: Sequence[str] | None, pad: Pad | None = None
    ) -> None:
        full = [footer for footer in footers if footer.num_rows]
        if not full:
            found = f"0 rows in {len(footers)} files, such as {footers[0].file.path}"
            raise DataError("data", found, "the dataset must not be empty", "correct the path given to parquet()")
        self._filesystem = filesystem
        chosen, left_out = choose_columns(full, columns)
        self._columns = _with_padding(chosen, left_out, pad) if pad else chosen
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
        check_nulls(full, self._columns)
        self._cached_groups: _Cache[Columns] = _Cache(CACHED_GROUPS)
        self._cached_footers: _Cache[Any] = _Cache(CACHED_FOOTERS)
        self._columns = self._with_longest()
        self._digest = _digest(full, self._columns)
        self._shapes = self._row_shapes()
        check_lengths(full, {c.name: self._shapes[c.name] for c in self._columns if not c.padding})

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
        kinds = {column.name: (column.dtype, self._shapes[column.name]) for column in self._columns}
        return take_from_chunks(row_ids, self._ends, kinds, self._group)

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
        """A decoded row group, with the partition keys of its file."""

        def read() -> Columns:
            decoded = dict(self._read(chunk, [column for column in self._columns if column.in_files]))
            for name, values in decoded.items():
                if values.shape[1:] != self._shapes[name]:
                    rule = f"has one shape in all files: {list(self._shapes[name])}, as in its first row"
                    raise self._error(chunk, name, f"rows of shape {list(values.shape[1:])}", rule, PAD_OR_CUT)
            index, _, rows = self._groups[chunk].tolist()
            return decoded | {name: np.full(rows, values[index]) for name, values in self._keys.items()}

        return self._cached_groups.get(chunk, read)

    def _read(self, chunk: int, columns: Sequence[Column]) -> Iterator[tuple[str, NDArray[Any]]]:
        table = self._table(chunk, columns)
        for column in columns:
            try:
                if column.padding is None:
                    yield column.name, decode(whole(table.column(column.name)))
                else:
                    values, lengths = padded(whole(table.column(column.name)), column.dtype, *column.padding)
                    yield column.name, values
                    yield _length_name(column), lengths
            except Unfit as unfit:
                found = f"{unfit.found}, first in row {unfit.row} of the row group"
                raise self._error(chunk, column.name, found, *unfit.remedy) from None

    def _table(self, chunk: int, columns: Sequence[Column]) -> pa.Table:
        """Some columns of a row group, as Arrow has them."""
        index, group, _ = self._groups[chunk].tolist()
        try:
            with self._filesystem.open_input_file(self._files[index].path) as stream:
                metadata = self._cached_footers.get(index, lambda: pq.read_metadata(stream))
                file = pq.ParquetFile(stream, metadata=metadata, pre_buffer=True)
                return file.read_row_group(group, columns=[column.name for column in columns])
        except (pa.ArrowInvalid, OSError) as error:
            raise unreadable(self._files[index], error) from error

    def _with_longest(self) -> list[Column]:
        """The columns, with the length of the longest list where none was given to pad to; reads all of those columns."""
        unknown = [column for column in self._columns if column.padding and not column.padding[1]]
        if not unknown:
            return self._columns

        def longest(chunk: int) -> list[int]:
            table = self._table(chunk, unknown)
            return [pc.max(lengths_of(combined(table.column(column.name)))).as_py() or 0 for column in unknown]

        with ThreadPoolExecutor(FOOTER_THREADS) as pool:
            found = np.max(list(pool.map(longest, range(len(self._groups)))), axis=0).tolist()
        known = {c.name: replace(c, padding=(c.padding[0], n)) for c, n in zip(unknown, found, strict=True) if c.padding}
        return [known.get(column.name, column) for column in self._columns]

    def _row_shapes(self) -> dict[str, tuple[int, ...]]:
        """The row shape of each column; for lists, which footers do not tell, from the first row group."""
        lists = [column for column in self._columns if column.depth and not column.padding]
        shapes: dict[str, tuple[int, ...]] = {c.name: (c.padding[1],) if c.padding else () for c in self._columns}
        shapes.update((name, values.shape[1:]) for name, values in (self._read(0, lists) if lists else ()))
        return shapes

    def _error(self, chunk: int, name: str, value: str, rule: str, fix: str) -> DataError:
        index, group, _ = self._groups[chunk].tolist()
        return DataError(f"data, column {name!r} of {self._files[index].path}, row group {group}", value, rule, fix)


def parquet(
    paths: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    columns: Sequence[str] | None = None,
    filesystem: fs.FileSystem | None = None,
    pad: Pad | None = None,
) -> ParquetSource:
    """A source over Parquet files.

    Args:
        paths: a path or URI, or a list of them: files, directories (all *.parquet below them) or local globs.
        columns: names of the columns to read; by default all with numbers, booleans or lists of them.
            Partition keys in paths (year=2024) are int64 columns if all their values are whole numbers.
        filesystem: filesystem of the paths, if they are neither local nor URIs.
        pad: columns of lists of different lengths, such as {"tokens": 0} or {"tokens": (0, 128)}. Each row is filled up
            with this value to the length given, by default that of the longest list, for which the driver reads the
            column once. An int64 column such as tokens_length tells how many values of a row are those of its list.

    Raises:
        DataError: a path is missing, a file is damaged, there are no rows, a column cannot become a tensor, or `pad` does
            not fit it.
    """
    filesystem, files = find_files(paths, filesystem)
    return ParquetSource(filesystem, read_footers(filesystem, files), columns, pad)


def _with_padding(columns: Sequence[Column], left_out: Mapping[str, str], pad: Pad) -> list[Column]:
    """The columns, with how each is padded; the length is 0 where it is that of the longest list."""
    where, names = "parquet(pad=...)", [column.name for column in columns]
    for name in pad:
        if name in left_out:
            raise left_out_column(where, name, left_out[name])
        if name not in names:
            raise missing_column(where, name, names)
    fitted = []
    for column in columns:
        fitted.append(column)
        if column.name in pad:
            fitted[-1] = replace(column, padding=_padding(f"{where}, column {column.name!r}", column, pad[column.name]))
            fitted.append(Column(_length_name(column), np.dtype(np.int64), is_length=True))
            if fitted[-1].name in names:
                rule = "has the lengths of the lists, and each column has a name of its own"
                raise DataError(where, f"column {fitted[-1].name!r}", rule, "rename it, or leave it out of columns=")
    return fitted


def _padding(where: str, column: Column, given: Any) -> tuple[float, int]:
    """The value and the length that `pad` gives for a column, as 0 or (0, 128)."""
    if column.depth != 1:
        found = f"{column.dtype} in {column.depth} lists" if column.depth else f"{column.dtype}"
        raise DataError(where, found, "is padded where each row is one list of numbers", "leave it out of pad=")
    value, length = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if length is not None and not (isinstance(length, int) and length > 0):
        raise DataError(where, f"length {length}", "is a number of values, at least 1", "give pad={name: (value, length)}")
    if not _has_value(column.dtype, value):
        raise DataError(where, f"{value!r}", f"is a value that a column of {column.dtype} can have", "choose another value")
    return np.asarray(value).item(), length or 0


def _has_value(dtype: np.dtype[Any], value: Any) -> bool:
    """Whether a number can be a value of a column; floats are rounded."""
    if not isinstance(value, (int, float, np.number, np.bool_)):
        return False
    if dtype.kind == "f":
        return True
    limits = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    return bool(limits[0] <= value <= limits[1] and value == int(value))


def _length_name(column: Column) -> str:
    return f"{column.name}_length"


def _digest(footers: Sequence[Footer], columns: Sequence[Column]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file, rows in ((footer.file, footer.group_rows) for footer in footers):
        digest.update(repr((file.name, file.size_bytes, rows)).encode())
    digest.update(repr([(c.name, str(c.dtype), *(c.padding or ())) for c in columns]).encode())
    return digest.hexdigest()
