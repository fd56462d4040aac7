"""What the rest of raytrain needs to know about data: how many rows, in which chunks, and how to take some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Columns = dict[str, NDArray[Any]]
"""Numpy columns by name, all of shape [rows, ...]; what `Task.transform` takes and returns."""


class Source(Protocol):
    """Rows with numbers 0 to num_rows - 1. Picklable, and cheap to pickle."""

    @property
    def num_rows(self) -> int: ...

    @property
    def chunk_rows(self) -> tuple[int, ...] | None:
        """Rows of each chunk that is read at once, summing up to num_rows; None where rows are in memory."""

    @property
    def columns(self) -> Sequence[str]:
        """Names of the columns that `take` returns."""

    def take(self, rows: NDArray[np.int64]) -> Columns:
        """The rows with these numbers, in this order; each column has shape [len(rows), ...]."""

    def fingerprint(self) -> dict[str, Any]:
        """Plain values that differ when the data differ; compared, key by key, when a run is resumed."""
