"""Which rows do arrays in memory, or a map-style PyTorch dataset, have?

`arrays` holds whole columns; `dataset` calls the user's dataset for one row at a time and stacks the results. Neither
shuffles. Built in the driver, read in workers or in Ray Data's processes, so the user's dataset must be picklable (numpy
columns travel through Ray's object store without a copy). Calls to a dataset may be concurrent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raytrain.data.source import Columns, is_tensor, to_array
from raytrain.errors import DataError


class ArraySource:
    """Columns in memory, all of shape [num_rows, ...]; see `arrays`."""

    chunk_rows: tuple[int, ...] | None = None

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    @property
    def num_rows(self) -> int:
        return len(next(iter(self._columns.values())))

    @property
    def columns(self) -> Sequence[str]:
        return tuple(self._columns)

    def take(self, row_ids: NDArray[np.int64]) -> Columns:
        """The rows with these ids, in this order, as fresh arrays."""
        return {name: values.take(row_ids, axis=0) for name, values in self._columns.items()}

    def fingerprint(self) -> dict[str, Any]:
        """Number of rows, and dtype, row shape and a digest of the values of each column (about a second per GB)."""
        return {"kind": "arrays", "rows": self.num_rows} | {
            f"column {name}": f"{values.dtype} {list(values.shape[1:])} {_digest(values)}"
            for name, values in self._columns.items()
        }


def arrays(**columns: Any) -> ArraySource:
    """A source over columns in memory.

    Args:
        columns: numpy arrays, tensors or nested lists of numbers, each with one entry per row in its first dimension.

    Raises:
        DataError: there are no columns or no rows, the numbers of rows differ, or a column is not numeric.
    """
    if not columns:
        raise DataError("arrays()", "no columns", "a dataset has at least one column", "call arrays(name=values, ...)")
    converted = {name: to_array("arrays()", name, values) for name, values in columns.items()}
    lengths = {name: len(values) for name, values in converted.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise DataError("arrays()", found, "all columns have the same number of rows", "make their first dimensions equal")
    if not next(iter(lengths.values())):
        found = "0 rows in " + ", ".join(converted)
        raise DataError("arrays()", found, "the dataset must not be empty", "check what was loaded")
    return ArraySource(converted)


class MapStyleDataset(Protocol):
    """A `torch.utils.data.Dataset` with a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class DatasetSource:
    """The rows of a map-style dataset; row 0 sets the columns, their dtypes and row shapes. See `dataset`."""

    chunk_rows: tuple[int, ...] | None = None

    def __init__(self, rows: MapStyleDataset) -> None:
        self._rows = rows
        self.num_rows = len(rows)
        if not self.num_rows:
            raise DataError(self._where, "0 rows", "the dataset must not be empty", "check what the dataset loaded")
        self._example = self._as_columns(0, rows[0])

    @property
    def columns(self) -> Sequence[str]:
        return tuple(self._example)

    def take(self, row_ids: NDArray[np.int64]) -> Columns:
        """The rows with these ids, in this order.

        Raises:
            DataError: a row has other columns, shapes or dtypes than row 0.
        """
        found = [self._as_columns(int(row), self._rows[int(row)]) for row in row_ids]
        return {name: self._stack(name, [row[name] for row in found]) for name in self._example}

    def fingerprint(self) -> dict[str, Any]:
        """Number of rows, columns, dtypes and shapes; not the values, since each row would have to be loaded."""
        kinds = {f"column {name}": f"{value.dtype} {list(value.shape[1:])}" for name, value in self._example.items()}
        return {"kind": f"dataset {type(self._rows).__name__}", "rows": self.num_rows, **kinds}

    @property
    def _where(self) -> str:
        return f"dataset({type(self._rows).__name__})"

    def _as_columns(self, row: int, item: Any) -> Columns:
        """One row as columns of shape [1, ...]."""
        if isinstance(item, (tuple, list)):
            item = {str(position): value for position, value in enumerate(item)}
        elif not isinstance(item, Mapping):
            item = {"0": item}
        where = f"{self._where}, row {row}"
        columns = {str(name): to_array(where, str(name), _with_row_dimension(value)) for name, value in item.items()}
        example = getattr(self, "_example", columns)
        if columns.keys() != example.keys():
            rule = "has the columns of row 0: " + ", ".join(example)
            raise DataError(where, "columns " + ", ".join(columns), rule, "return the same names for each row")
        return columns

    def _stack(self, name: str, values: list[NDArray[Any]]) -> NDArray[Any]:
        example = self._example[name]
        for value in values:
            if value.shape != example.shape or not np.can_cast(value.dtype, example.dtype):
                found = f"{value.dtype} {list(value.shape[1:])}"
                rule = f"each row is like row 0: {example.dtype} {list(example.shape[1:])}"
                fix = "pad or cut the rows, and return one type"
                raise DataError(f"{self._where}, column {name!r}", found, rule, fix)
        return np.concatenate(values).astype(example.dtype, copy=False) if values else example[:0].copy()


def dataset(map_style: MapStyleDataset) -> DatasetSource:
    """A source over a map-style dataset, such as those of torchvision.

    Args:
        map_style: returns for each index a mapping of names to tensors, arrays or numbers of a fixed shape, or a tuple
            of them, whose columns are then named "0", "1", and so on.

    Raises:
        DataError: the dataset is empty, or row 0 is not numeric.
    """
    return DatasetSource(map_style)


def _digest(values: NDArray[Any]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, digest_size=8).hexdigest()


def _with_row_dimension(value: Any) -> Any:
    """A value with a first dimension of 1."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)[None]
    return value[None] if is_tensor(value) else [value]
