"""What does a hook of the task get? A dictionary of tensors that names the nearest column when a name is wrong.

Turns numpy columns into tensors and keeps them together with the numbers of the rows that were read. It does not
choose rows and does not move tensors to a device. Runs in the worker, in the training thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from raytrain.data.columns import missing_column
from raytrain.data.source import Columns


class Batch(dict[str, torch.Tensor]):
    """Tensors by column name, each of shape [rows, ...]."""

    def __missing__(self, name: object) -> NoReturn:
        """Raises DataError with the nearest column name."""
        raise missing_column("batch", str(name), self)


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward and backward pass.

    Args:
        columns: tensors of shape [rows, ...].
        rows: numbers in the source of the rows that were read, shape [rows], int64.
    """

    columns: Batch
    rows: NDArray[np.int64]


def to_tensors(columns: Columns) -> Batch:
    """Numpy columns as tensors: they share memory, but for read-only arrays, which are copied.

    A hook may write into a batch; memory that is shared with other processes must not be written to.
    """
    return Batch((name, torch.from_numpy(_writable(values))) for name, values in columns.items())


def rows_to_tensors(columns: Columns, rows: slice) -> Batch:
    """Some rows of numpy columns as tensors with memory of their own. Each step calls this: 3 us a column."""
    as_tensor = torch.from_numpy
    return Batch({name: as_tensor(values[rows].copy()) for name, values in columns.items()})


def _writable(values: NDArray[Any]) -> NDArray[Any]:
    return values if values.flags.writeable else values.copy()
