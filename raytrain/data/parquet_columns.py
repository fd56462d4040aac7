"""Which columns of Parquet files become tensors, of which type and shape, and how is one decoded?

Decides from footers alone, for all files together, so that a column has one type and one shape in every batch of a
run. Opens no files. Used by `parquet`, in the driver and wherever rows are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raytrain.data.columns import missing_column
from raytrain.data.parquet_files import Footer
from raytrain.errors import DataError


@dataclass(frozen=True)
class Column:
    """A column that becomes tensors.

    Args:
        name: its name in the files.
        dtype: its type in every batch.
        is_list: whether a row is a list; its shape is that of the first row then.
        is_key: whether it comes from the path, as in year=2024.
    """

    name: str
    dtype: np.dtype[Any]
    is_list: bool = False
    is_key: bool = False


class Unfit(Exception):
    """A column cannot be decoded: what was found, the rule and the fix."""


def choose_columns(footers: Sequence[Footer], wanted: Sequence[str] | None) -> tuple[list[Column], dict[str, str]]:
    """The columns to read, and those that are left out with the reason.

    Args:
        footers: of files that have rows.
        wanted: names to read; None for all that can become tensors.

    Raises:
        DataError: a wanted column is missing or cannot become a tensor, or one is in some files only.
    """
    names = list(dict.fromkeys(name for footer in footers for name in [*footer.schema.names, *_keys(footer)]))
    for name in wanted or ():
        if name not in names:
            raise missing_column("parquet(columns=...)", name, names)
    chosen, left_out = [], {}
    for name in names if wanted is None else wanted:
        reason, where = _obstacle(footers, name)
        if not reason:
            _check_everywhere(footers, name)
            chosen.append(_column(footers, name))
        elif wanted is None:
            left_out[name] = reason
        else:
            fix = "leave the column out of columns=, or write it as numbers"
            raise DataError(f"data, column {name!r} of {where}", reason, "numbers and booleans become tensors", fix)
    if not chosen:
        found = ", ".join(f"{name} ({reason})" for name, reason in left_out.items()) or "no columns"
        raise DataError("data", found, "a column at least can become a tensor", "write a column as numbers")
    return chosen, left_out


def key_values(footer: Footer, name: str) -> int:
    """The value of a partition key of a file."""
    return int(footer.file.keys[name])


def decode(column: pa.ChunkedArray) -> NDArray[Any]:
    """An Arrow column as numpy, of shape [rows, ...]; may share its memory.

    Raises:
        Unfit: it has nulls or rows of different shapes.
    """
    if column.null_count:
        raise Unfit(f"{column.null_count} nulls", "has no nulls", "fill the nulls, or drop those rows")
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return _decode(array)


def _decode(array: pa.Array) -> NDArray[Any]:
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return np.asarray(array.to_numpy_ndarray())
    if pa.types.is_dictionary(kind):
        return _decode(array.dictionary_decode())
    if not _is_list(kind):
        if array.null_count:
            raise Unfit(f"{array.null_count} nulls inside of lists", "has no nulls", "fill the nulls, or drop those rows")
        return np.asarray(array.to_numpy(zero_copy_only=False))
    if array.null_count:
        raise Unfit(f"{array.null_count} nulls inside of lists", "has no nulls", "fill the nulls, or drop those rows")
    length = kind.list_size if pa.types.is_fixed_size_list(kind) else _common_length(array)
    inner = _decode(array.flatten())
    return inner.reshape(len(array), length, *inner.shape[1:])


def _common_length(array: pa.Array) -> int:
    bounds = pc.min_max(pc.list_value_length(array)).as_py()
    if bounds["min"] != bounds["max"]:
        found = f"lists of {bounds['min']} to {bounds['max']} values"
        raise Unfit(found, "all lists of a column have the same length", "pad or cut the lists")
    return int(bounds["max"] or 0)


def _keys(footer: Footer) -> list[str]:
    return [name for name in footer.file.keys if name not in footer.schema.names]


def _field(footer: Footer, name: str) -> pa.DataType | None:
    return footer.schema.field(name).type if name in footer.schema.names else None


def _obstacle(footers: Sequence[Footer], name: str) -> tuple[str, str]:
    """Why a column cannot become tensors, and the file that shows it; empty texts where it can."""
    for footer in footers:
        kind = _field(footer, name)
        if kind is not None and _dtype(kind) is None:
            return f"type {kind}", footer.file.path
        if kind is None and not _is_integer(footer.file.keys.get(name, "0")):
            return f"partition key {name}={footer.file.keys[name]}, not a whole number", footer.file.path
    return "", ""


def _check_everywhere(footers: Sequence[Footer], name: str) -> None:
    has = [name in footer.schema.names or name in footer.file.keys for footer in footers]
    if not all(has):
        without, example = footers[has.index(False)].file.path, footers[has.index(True)].file.path
        fix = "leave it out by naming the wanted ones in parquet(columns=...), or write it to all files"
        raise DataError(f"data, column {name!r}", f"not in {without}", f"is in all files, as in {example}", fix)


def _column(footers: Sequence[Footer], name: str) -> Column:
    kinds = {kind for footer in footers if (kind := _field(footer, name)) is not None}
    if not kinds:
        return Column(name, np.dtype(np.int64), is_key=True)
    dtypes = [dtype for kind in kinds if (dtype := _dtype(kind)) is not None]
    return Column(name, np.result_type(*dtypes), is_list=any(map(_is_list, kinds)))


def _dtype(kind: pa.DataType) -> np.dtype[Any] | None:
    """The numpy type of the innermost values; None where they are no numbers."""
    if isinstance(kind, pa.FixedShapeTensorType) or _is_list(kind) or pa.types.is_dictionary(kind):
        return _dtype(kind.value_type)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return dtype
    return None


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or isinstance(kind, pa.FixedShapeTensorType)
    )


def _is_integer(text: str) -> bool:
    try:
        return abs(int(text)) < 2**63
    except ValueError:
        return False
