"""What is a source, and what is a column?

A source has numbered rows and returns any of them as columns: numpy arrays of a dtype that PyTorch has, one entry per
row, of one dtype and one row shape in all of a run. Converts what others made into such arrays, or refuses it. Pure
functions. Does not import PyTorch, which takes seconds: Ray Data's processes start without it.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raytrain.errors import DataError

Columns = dict[str, NDArray[Any]]
"""Numpy arrays by column name, all of shape [rows, ...]; what `Task.transform` takes and returns."""


class Source(Protocol):
    """Rows with ids 0 to num_rows - 1. Picklable, and cheap to pickle."""

    @property
    def num_rows(self) -> int: ...

    @property
    def chunk_rows(self) -> tuple[int, ...] | None:
        """Number of rows of each chunk that is read at once, adding up to num_rows; None where rows are in memory."""

    @property
    def columns(self) -> Sequence[str]:
        """Names of the columns that `take` returns."""

    def take(self, row_ids: NDArray[np.int64]) -> Columns:
        """The rows with these ids, in this order; each column has shape [len(row_ids), ...]."""

    def fingerprint(self) -> dict[str, Any]:
        """Plain values that differ when the data differ; a resume compares them key by key."""


def is_tensor(value: Any) -> bool:
    """Whether a value is a PyTorch tensor; never imports PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_array(where: str, name: str, values: Any) -> NDArray[Any]:
    """Converts a column to a numpy array in native byte order, of a dtype that PyTorch has.

    Args:
        where: where the column comes from, for the error.
        name: name of the column.
        values: numpy array, torch tensor, or nested lists of numbers.

    Raises:
        DataError: the values are ragged, are not numbers, or have no row dimension.
    """
    if is_tensor(values):
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise _ragged(where, name) from None
    if array.dtype.kind == "O" and any(np.ndim(value) for value in array.flat):
        raise _ragged(where, name)
    where = f"{where}, column {name!r}"
    if array.dtype.kind not in "biufc":
        rule = "a column holds numbers or booleans, as tensors do"
        raise DataError(where, f"type {array.dtype}", rule, "leave the column out, or encode it as numbers")
    if array.ndim == 0:
        raise DataError(where, f"{array}", "a column has one entry per row", "give a list or an array")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def check_types(types: dict[str, Any], columns: Columns) -> None:
    """Checks that columns are like those seen before; records them in `types`, which is empty at first.

    Raises:
        DataError: a column appeared, vanished, or changed its dtype or row shape.
    """
    found = {name: (values.dtype, values.shape[1:]) for name, values in columns.items()}
    if found == types:
        return
    if not types:
        types.update(found)
        return
    name = next(name for name in {**types, **found} if types.get(name) != found.get(name))
    before, now = (f"{t[name][0]} {list(t[name][1])}" if name in t else "absent" for t in (types, found))
    rule = f"a column has one type and one shape per row in all batches of a run; before: {before}"
    raise DataError(f"data, column {name!r}", now, rule, "return the same type and shape for all rows from `transform`")


def missing_column(where: str, name: str, known: Iterable[str]) -> DataError:
    """The error for a column that does not exist; suggests the nearest one that does."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    rule = "is one of the columns " + ", ".join(known) if known else "there are no columns"
    return DataError(where, f"no column {name!r}", rule, f"did you mean {near[0]!r}?" if near else "correct the name")


def sliced(columns: Columns, part: slice) -> Columns:
    """Some consecutive rows, sharing memory."""
    return {name: values[part] for name, values in columns.items()}


def _ragged(where: str, name: str) -> DataError:
    rule = "all rows of a column have the same shape"
    return DataError(f"{where}, column {name!r}", "rows of different lengths", rule, "pad or cut the rows")
