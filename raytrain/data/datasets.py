"""A map-style PyTorch dataset (`len` and `[]`) as a source of rows.

Calls the dataset for one row at a time and stacks the results. It does not shuffle and does not guard the dataset
against concurrent calls. Built in the driver, read in the workers or in Ray Data's processes, so the dataset is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raytrain.data.columns import is_tensor, to_array
from raytrain.data.source import Columns
from raytrain.errors import DataError


class MapStyle(Protocol):
    """What `torch.utils.data.Dataset` with a length offers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class DatasetSource:
    """The rows of a map-style dataset; the first row sets the columns, their types and shapes. See `dataset`."""

    chunk_rows: tuple[int, ...] | None = None

    def __init__(self, rows: MapStyle) -> None:
        self._rows = rows
        self.num_rows = len(rows)
        if not self.num_rows:
            raise DataError(self._where, "0 rows", "data have a row at least", "check what the dataset loaded")
        self._example = self._as_columns(0, rows[0])

    @property
    def columns(self) -> Sequence[str]:
        return tuple(self._example)

    def take(self, rows: NDArray[np.int64]) -> Columns:
        """The rows with these numbers, in this order.

        Raises:
            DataError: a row has other columns, shapes or types than row 0.
        """
        found = [self._as_columns(int(row), self._rows[int(row)]) for row in rows]
        return {name: self._stack(name, [row[name] for row in found]) for name in self._example}

    def fingerprint(self) -> dict[str, Any]:
        """Rows, columns, types and shapes; the values are not looked at, since each would have to be loaded."""
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
        columns = {str(name): to_array(where, str(name), _one(value)) for name, value in item.items()}
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
        if not values:
            return example[:0].copy()
        return np.concatenate(values).astype(example.dtype, copy=False)


def dataset(map_style: MapStyle) -> DatasetSource:
    """A source over a map-style dataset, such as those of torchvision.

    Args:
        map_style: returns for each index a mapping of names to tensors, arrays or numbers of a fixed shape, or a tuple
            of them, whose columns are then named "0", "1", and so on.

    Raises:
        DataError: the dataset is empty, or row 0 is not numbers.
    """
    return DatasetSource(map_style)


def _one(value: Any) -> Any:
    """A value with a first dimension of 1."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)[None]
    return value[None] if is_tensor(value) else [value]
