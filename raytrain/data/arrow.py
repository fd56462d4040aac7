"""How does an Arrow array become a numpy array of one row shape?

Lists become further dimensions, ragged ones if they are padded; nulls and rows of different shapes are refused, with the
first row where they are. Knows no files. Runs wherever rows are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raytrain.data.source import NO_NULLS, Columns, empty_columns, gather

LIST_TYPES = pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.FixedShapeTensorType
PAD_OR_CUT = "pad or cut the lists; pad={name: value} of parquet() and jsonl() pads lists of numbers"

Kinds = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Dtype and row shape of each column."""


class Unfit(Exception):
    """A column cannot be decoded, since it has nulls or rows of different shapes.

    Args:
        found: what is wrong.
        row: the first row, from the start of the row group, where it is.
        remedy: the rule and the fix.
    """

    def __init__(self, found: str, row: int, remedy: tuple[str, str]) -> None:
        super().__init__(found, row, remedy)
        self.found, self.row, self.remedy = found, row, remedy


def take_from_chunks(
    row_ids: NDArray[np.int64], ends: NDArray[np.int64], kinds: Kinds, read: Callable[[int], Columns]
) -> Columns:
    """Rows of chunks that follow each other, in the order of `row_ids`; reads each chunk once.

    Args:
        ends: row ids after the last row of each chunk.
        kinds: of the columns to take.
        read: returns all rows of a chunk.
    """
    chunk = np.searchsorted(ends, row_ids, side="right")
    numbers = np.flatnonzero(np.bincount(chunk, minlength=len(ends)))
    chunks = [read(number) for number in numbers.tolist()]
    shift = np.empty(len(ends), np.int64)  # from a row's id to its position, where these chunks follow each other
    shift[numbers] = np.cumsum(np.diff(ends, prepend=0)[numbers]) - ends[numbers]
    position = row_ids + shift[chunk]
    taken = empty_columns(kinds, len(row_ids))
    for name, values in taken.items() if chunks else ():
        gather([columns[name] for columns in chunks], position, values)
    return taken


def padded(array: pa.Array, dtype: np.dtype[Any], value: float, length: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Lists as rows of shape [rows, length], and how many values of each are those of the list. Raises Unfit."""
    lengths = np.asarray(lengths_of(array)).astype(np.int64)
    if len(over := np.flatnonzero(lengths > length)):
        rule = f"has at most the {length} values to which pad= fills up"
        raise Unfit(
            f"a list of {lengths[over[0]]} values", int(over[0]), (rule, "cut the list, or raise the length in pad=")
        )
    try:
        inner = decode(_storage(array).flatten())
    except Unfit as unfit:
        row = int(np.searchsorted(np.cumsum(lengths), unfit.row, side="right"))
        raise Unfit(unfit.found, row, unfit.remedy) from None
    values = np.full((len(lengths), length), value, dtype)
    values[np.arange(length) < lengths[:, None]] = inner
    return values, lengths


def lengths_of(array: pa.Array) -> pa.Array:
    """Number of values of each list."""
    return pc.list_value_length(_storage(array))


def digest_of(table: pa.Table) -> str:
    """A digest of the names, types and values of a table."""
    stored = pa.BufferOutputStream()
    with pa.ipc.new_stream(stored, table.schema.remove_metadata()) as stream:
        stream.write_table(table.replace_schema_metadata(None).combine_chunks())
    return hashlib.blake2b(stored.getvalue(), digest_size=16).hexdigest()


def whole(column: pa.ChunkedArray) -> pa.Array:
    """A column without nulls as one array. Raises Unfit."""
    if column.null_count:
        raise Unfit(f"{column.null_count} nulls", _first(column.is_null()), NO_NULLS)
    return combined(column)


def combined(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        return pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array


def decode(array: pa.Array) -> NDArray[Any]:
    """An Arrow array as numpy, of shape [rows, ...]; may share its memory. Raises Unfit."""
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return np.asarray(array.to_numpy_ndarray())
    if isinstance(kind, pa.BaseExtensionType):  # tensors of Ray know their shape, those of Hugging Face are lists
        return np.asarray(array.to_numpy(zero_copy_only=False)) if hasattr(kind, "shape") else decode(array.storage)
    if pa.types.is_dictionary(kind):
        return decode(array.dictionary_decode())
    if array.null_count:
        raise Unfit(f"{array.null_count} nulls inside of lists", _first(array.is_null()), NO_NULLS)
    if not isinstance(kind, LIST_TYPES):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    length = kind.list_size if pa.types.is_fixed_size_list(kind) else _common_length(array)
    try:
        inner = decode(array.flatten())
    except Unfit as unfit:
        raise Unfit(unfit.found, unfit.row // length, unfit.remedy) from None
    return inner.reshape(len(array), length, *inner.shape[1:])


def depth_of(kind: pa.DataType) -> int:
    """How many lists are around a number; 0 for a number."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return len(kind.shape)
    return 1 + depth_of(kind.value_type) if isinstance(kind, LIST_TYPES) else 0


def dtype_of(kind: pa.DataType) -> np.dtype[Any] | None:
    """The numpy dtype of the innermost values; None where they are not numbers."""
    if isinstance(kind, LIST_TYPES) or pa.types.is_dictionary(kind):
        return dtype_of(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return dtype_of(kind.storage_type)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return dtype
    return None


def _storage(array: pa.Array) -> pa.Array:
    """The lists of a column of tensors of one dimension; any other array as it is."""
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _common_length(array: pa.Array) -> int:
    lengths = pc.list_value_length(array)
    bounds = pc.min_max(lengths).as_py()
    if bounds["min"] != bounds["max"]:
        found, rule = f"lists of {bounds['min']} to {bounds['max']} values", "all lists of a column have the same length"
        raise Unfit(found, _first(pc.not_equal(lengths, lengths[0])), (rule, PAD_OR_CUT))
    return int(bounds["max"] or 0)


def _first(mask: pa.Array) -> int:
    """The first row where a mask is true."""
    return int(pc.index(mask, True).as_py())
