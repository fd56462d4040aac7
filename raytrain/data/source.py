"""What is a source, and what is a column?

A source has numbered rows and returns any of them as columns: numpy arrays of a dtype that PyTorch has, one entry per
row, of one dtype and one row shape in all of a run. Converts what others made into such arrays, or refuses it. Pure
functions. Does not import PyTorch, which takes seconds: Ray Data's processes start without it.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from raytrain.errors import DataError

Columns = dict[str, NDArray[Any]]
"""Numpy arrays by column name, all of shape [rows, ...]; what `Task.transform` takes and returns."""

NOTHING: Mapping[str, str] = MappingProxyType({})
"""No columns that were left out."""

Seed = tuple[int, int]
"""The seed of the run, and the epoch."""

ALIGNMENT = 64  # bytes; what other frameworks need to use memory without a copy

NO_NULLS = "has no nulls", "fill the nulls, or drop those rows"
"""Rule and fix of a column with nulls."""


class NotNumbers(DataError):
    """A column holds what cannot become a tensor."""


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

    @property
    def left_out(self) -> Mapping[str, str]:
        """For each column that cannot become a tensor, and is not read, the reason."""

    @property
    def runs_user_code(self) -> bool:
        """Whether `take` runs the user's code, so that it may not run in a thread beside the training."""

    @property
    def decodes(self) -> bool:
        """Whether `take` makes rows one by one, as from images or from a file for each; copying memory takes less."""

    def take(self, row_ids: NDArray[np.int64], seed: Seed = (0, 0)) -> Columns:
        """The rows with these ids, in this order; each column has shape [len(row_ids), ...].

        Random numbers that the user's code draws for a row follow from `seed` and the row alone.
        """

    def fingerprint(self) -> dict[str, Any]:
        """Plain values that differ when the data differ; a resume compares them key by key."""


def is_tensor(value: Any) -> bool:
    """Whether a value is a PyTorch tensor; never imports PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_array(where: str, name: str, values: Any) -> NDArray[Any]:
    """Converts a column to a numpy array in native byte order, of a dtype that PyTorch has. Keeps each value exactly.

    Args:
        where: where the column comes from, for the error.
        name: name of the column.
        values: numpy array, torch tensor, or nested lists of numbers.

    Raises:
        NotNumbers: the values are not numbers.
        DataError: the values are ragged, have nulls, have no row dimension, or are integers that become rounded floats.
    """
    where = f"{where}, column {name!r}"
    if is_tensor(values):
        values = _from_tensor(where, values)
    if num_nulls := _num_nulls(values):
        raise DataError(where, f"{num_nulls} nulls", *NO_NULLS)
    try:
        array = np.asarray(values)
    except ValueError:
        raise _ragged(where) from None
    if array.dtype.kind == "O" and any(np.ndim(value) for value in array.flat):
        raise _ragged(where)
    if not _is_numeric(array):
        rule = "a column holds numbers or booleans, as tensors do"
        raise NotNumbers(
            where, f"type {array.dtype}{_example(array, values)}", rule, "leave it out, or encode it as numbers"
        )
    if array.ndim == 0:
        raise DataError(where, f"{array}", "a column has one entry per row", "give a list or an array")
    if isinstance(values, (list, tuple)):
        _check_integers(where, values, array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def keeps_values(dtype: np.dtype[Any], wider: np.dtype[Any]) -> bool:
    """Whether a dtype has all values of another one; numpy calls int64 to float64 safe, which rounds."""
    if dtype.kind in "iu" and wider.kind in "fc":
        return int(np.iinfo(dtype).max) < _whole_numbers(wider)
    return bool(np.can_cast(dtype, wider))


def widened(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """The same values with another dtype; None if it cannot hold them exactly."""
    if values.dtype == dtype:
        return values
    if not np.can_cast(values.dtype, dtype):
        return None
    if not keeps_values(values.dtype, dtype):
        largest = max(int(values.max(initial=0)), -int(values.min(initial=0)))
        if largest > _whole_numbers(dtype):
            return None
    return values.astype(dtype)


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


Values = TypeVar("Values")


class ByColumn(dict[str, Values]):
    """Values by column name; asking for a column that does not exist says which do, or why it was left out.

    Args:
        left_out: for each column of the source that is not read, the reason.
    """

    def __init__(self, values: Mapping[str, Values], left_out: Mapping[str, str]) -> None:
        super().__init__(values)
        self.left_out = left_out

    def __missing__(self, name: object) -> NoReturn:
        """Raises DataError with the type of a column that was left out, else with the nearest name."""
        if not isinstance(name, str) and str(name) in self:
            raise DataError("batch", f"column {name!r}", "the names of columns are text", f'write batch["{name}"]')
        if str(name) in self.left_out:
            raise left_out_column("batch", str(name), self.left_out[str(name)])
        raise missing_column("batch", str(name), self)


def missing_column(where: str, name: str, known: Iterable[str]) -> DataError:
    """The error for a column that does not exist; suggests the nearest one that does."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    rule = "is one of the columns " + ", ".join(known) if known else "there are no columns"
    return DataError(where, f"no column {name!r}", rule, f"did you mean {near[0]!r}?" if near else "correct the name")


def left_out_column(where: str, name: str, reason: str) -> DataError:
    """The error for a column that exists, and cannot become a tensor."""
    rule = "numbers, booleans and lists of them become tensors; other columns are not read"
    fix = "write it as numbers, or decode it in __getitem__ of a dataset and give raytrain.dataset(rows)"
    return DataError(where, f"column {name!r} is left out: {reason}", rule, fix)


def sliced(columns: Columns, part: slice) -> Columns:
    """Some consecutive rows, sharing memory."""
    return {name: values[part] for name, values in columns.items()}


def empty_columns(kinds: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], num_rows: int) -> Columns:
    """Uninitialised columns of some dtypes and row shapes, in one allocation and each aligned to 64 bytes.

    numpy asks the system for huge pages where an allocation is large. Touching fresh memory in small pages would take
    longer than filling it with rows.
    """
    sizes = [num_rows * dtype.itemsize * math.prod(shape) for dtype, shape in kinds.values()]
    ends = np.cumsum([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]).tolist()
    memory = np.empty((ends[-1] if ends else 0) + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return {
        name: memory[first + start : first + start + size].view(dtype).reshape(num_rows, *shape)
        for (name, (dtype, shape)), start, size in zip(kinds.items(), [0, *ends], sizes, strict=False)
    }


def gather(parts: Sequence[NDArray[Any]], rows: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copies rows, counted through all parts, into `out`, whose dtype has all values of the parts'."""
    line = parts[0] if len(parts) == 1 else np.concatenate(parts, dtype=out.dtype)
    np.take(line.astype(out.dtype, copy=False), rows, axis=0, out=out, mode="clip")  # "raise" would copy once more


def _is_numeric(array: NDArray[Any]) -> bool:
    """Whether PyTorch has its dtype: not extended precision."""
    return array.dtype.kind in "biufc" and array.dtype.itemsize <= (16 if array.dtype.kind == "c" else 8)


def _whole_numbers(dtype: np.dtype[Any]) -> int:
    """A floating dtype has all whole numbers up to this one."""
    return int(2 ** (np.finfo(dtype).nmant + 1))


def _from_tensor(where: str, tensor: Any) -> NDArray[Any]:
    try:
        array: NDArray[Any] = tensor.numpy(force=True)
    except (TypeError, RuntimeError):
        found = f"tensor of {tensor.dtype}, {tensor.layout}"
        fix = "convert it, for example with .float() or .to_dense()"
        raise DataError(where, found, "is a dense tensor of a dtype that numpy has", fix) from None
    return array


def _num_nulls(values: Any) -> int:
    """Nulls that conversion to numpy would hide: of masked arrays, and of columns of pandas, Arrow and polars."""
    if isinstance(values, np.ma.MaskedArray):
        return int(np.ma.getmaskarray(values).sum())
    dtype: Any = getattr(values, "dtype", None)
    if hasattr(dtype, "na_value") and dtype.kind in "biufc":  # of pandas, as Int64
        return int(values.isna().sum())
    count = getattr(values, "null_count", 0)
    return int(count() if callable(count) else count)


def _example(array: NDArray[Any], values: Any) -> str:
    """The first entry that is not a number, in text; with its row if there are several."""
    entries = values if isinstance(values, (list, tuple)) else array.flat
    for row, entry in enumerate(entries):
        if not _is_numeric(np.asarray(entry)):
            text = repr(entry)
            return f": {text if len(text) < 40 else type(entry).__name__}" + (f" in row {row}" if len(array) > 1 else "")
    return ""


def _check_integers(where: str, values: Any, array: NDArray[Any]) -> None:
    """Raises DataError if numpy rounded an integer, since other numbers of the list are not whole."""
    if array.dtype.kind == "f" and (np.abs(array) >= _whole_numbers(array.dtype)).any():
        for value in np.array(values, dtype=object).flat:
            if isinstance(value, int) and int(float(value)) != value:
                rule = f"keeps each value: numpy makes the column {array.dtype}, which rounds it"
                raise DataError(where, f"{value}", rule, "make it a column of integers alone, an array with a dtype")


def _ragged(where: str) -> DataError:
    rule = "all rows of a column have the same shape"
    return DataError(where, "rows of different lengths", rule, "pad or cut the rows")
