"""Data that fit in memory: numpy arrays, tensors or nested lists as a source of rows.

Reads no files and does not shuffle. Built in the driver; workers get the columns with the source (numpy columns travel
through Ray's object store without a copy).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytrain.data.columns import to_array
from raytrain.data.source import Columns
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

    def take(self, rows: NDArray[np.int64]) -> Columns:
        """The rows with these numbers, in this order, as fresh arrays."""
        return {name: values.take(rows, axis=0) for name, values in self._columns.items()}

    def fingerprint(self) -> dict[str, Any]:
        """Rows, and for each column its type, shape and a digest of its values (about a second per GB)."""
        return {"kind": "arrays", "rows": self.num_rows} | {
            f"column {name}": f"{values.dtype} {list(values.shape[1:])} {_digest(values)}"
            for name, values in self._columns.items()
        }


def arrays(**columns: Any) -> ArraySource:
    """A source over columns in memory.

    Args:
        columns: numpy arrays, tensors or nested lists of numbers, each with one entry per row in its first dimension.

    Raises:
        DataError: no columns, no rows, different numbers of rows, or a column that is not numbers.
    """
    if not columns:
        raise DataError("arrays()", "no columns", "data have a column at least", "call arrays(name=values, ...)")
    made = {name: to_array("arrays()", name, values) for name, values in columns.items()}
    lengths = {name: len(values) for name, values in made.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise DataError("arrays()", found, "all columns have the same number of rows", "make their first dimensions equal")
    if not next(iter(lengths.values())):
        raise DataError("arrays()", "0 rows in " + ", ".join(made), "data have a row at least", "check what was loaded")
    return ArraySource(made)


def _digest(values: NDArray[Any]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, digest_size=8).hexdigest()
