"""What does a hook of the task get? A dictionary of tensors that names the nearest column when a name is wrong.

Turns numpy columns into tensors and keeps them together with the numbers of the rows that were read. It does not
choose rows and does not move tensors to a device. Runs in the worker, in the training thread.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from raytrain.data.source import Columns
from raytrain.errors import DataError


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


def missing_column(where: str, name: str, known: Iterable[str]) -> DataError:
    """The error for a column that is not there, with the nearest one that is."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    rule = "is one of the columns " + ", ".join(known) if known else "there are no columns"
    return DataError(where, f"no column {name!r}", rule, f"did you mean {near[0]!r}?" if near else "correct the name")


def to_tensors(columns: Columns) -> Batch:
    """Numpy columns as tensors: they share memory, but for read-only arrays, which are copied.

    A hook may write into a batch; memory that is shared with other processes must not be written to.
    """
    return Batch((name, torch.from_numpy(_writable(values))) for name, values in columns.items())


def to_array(where: str, name: str, values: Any) -> NDArray[Any]:
    """A column that somebody else made, as a numpy array in native byte order that PyTorch can use.

    Args:
        where: whose column it is, for the error.
        name: its name.
        values: numpy array, torch tensor, or nested lists of numbers.

    Raises:
        DataError: the values are ragged, are no numbers, or have no rows dimension.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise _ragged(where, name) from None
    if array.dtype.kind == "O" and any(np.ndim(value) for value in array.flat):
        raise _ragged(where, name)
    if array.dtype.kind not in "biufc":
        rule = "columns are numbers or booleans, since tensors are"
        raise DataError(f"{where}, column {name!r}", f"type {array.dtype}", rule, "leave the column out, or encode it")
    if array.ndim == 0:
        raise DataError(f"{where}, column {name!r}", f"{array}", "has one value for each row", "give a list or an array")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _ragged(where: str, name: str) -> DataError:
    return DataError(
        f"{where}, column {name!r}", "rows of different lengths", "all rows have the same shape", "pad or cut the rows"
    )


def _writable(values: NDArray[Any]) -> NDArray[Any]:
    return values if values.flags.writeable else values.copy()
