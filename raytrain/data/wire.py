"""How does a block of rows travel through Ray Data without a change of type or shape?

Each column becomes one Arrow column of fixed-size binary values, a row each, whose name tells name, type and shape.
Ray Data may join and cut such tables at will. Writing and reading share memory with the arrays. Pure functions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raytrain.data.reading import Block

_LOGICAL, _PLACE, _ROWS = "logical", "place", "rows"  # other names begin with "["


def to_table(block: Block) -> pa.Table:
    """The block as a table with a row per row."""
    num_rows = len(block.rows)
    logical = np.full(num_rows, block.logical, dtype=np.int64)
    place = np.arange(block.place, block.place + num_rows, dtype=np.int64)
    arrays = {_LOGICAL: pa.array(logical), _PLACE: pa.array(place), _ROWS: pa.array(block.rows)}
    for name, values in block.columns.items():
        width = values.dtype.itemsize * math.prod(values.shape[1:])
        data = pa.py_buffer(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        column = pa.Array.from_buffers(pa.binary(width), num_rows, [None, data])
        arrays[json.dumps([name, values.dtype.str, values.shape[1:]])] = column
    return pa.table(arrays)


def from_table(table: pa.Table) -> Iterator[Block]:
    """The blocks of a table; several if Ray Data joined them. Their arrays are read-only."""
    for batch in table.to_batches():
        logical, place = batch.column(_LOGICAL).to_numpy(), batch.column(_PLACE).to_numpy()
        cuts = [0, *(np.flatnonzero((np.diff(logical) != 0) | (np.diff(place) != 1)) + 1).tolist(), len(logical)]
        for start, stop in pairwise(cuts if len(logical) else []):
            yield _block(batch.slice(start, stop - start))


def _block(batch: pa.RecordBatch) -> Block:
    columns = {}
    for key, column in zip(batch.schema.names, batch.columns, strict=True):
        if key not in (_LOGICAL, _PLACE, _ROWS):
            name, dtype, shape = json.loads(key)
            columns[name] = _array(column, np.dtype(dtype), shape)
    logical, place = batch.column(_LOGICAL)[0].as_py(), batch.column(_PLACE)[0].as_py()
    return Block(logical, place, batch.column(_ROWS).to_numpy(), columns)


def _array(column: pa.Array, dtype: np.dtype[Any], shape: list[int]) -> NDArray[Any]:
    width = dtype.itemsize * math.prod(shape)
    if not width:
        return np.empty((len(column), *shape), dtype)
    data = np.frombuffer(column.buffers()[1], dtype=np.uint8)
    start = column.offset * width
    return data[start : start + len(column) * width].view(dtype).reshape(len(column), *shape)
