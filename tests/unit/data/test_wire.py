from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.data.reading import Block
from raytrain.data.wire import from_table, to_table


def block(logical: int, first: int, count: int, dtype: str = "int64", shape: tuple[int, ...] = ()) -> Block:
    rows = np.arange(first, first + count)
    values = np.broadcast_to(rows.reshape(-1, *([1] * len(shape))), (count, *shape)).astype(dtype)
    return Block(logical, first + 2**40, rows, {"x": values, "id": rows})


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "uint16", "float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0)])
def test_types_and_shapes_travel_unchanged(dtype: str, shape: tuple[int, ...]) -> None:
    sent = block(1, 5, 4, dtype, shape)
    (got,) = from_table(to_table(sent))
    assert got.logical == 1
    assert got.place == 5 + 2**40
    assert got.rows.tolist() == [5, 6, 7, 8]
    assert got.columns["x"].dtype == dtype
    assert got.columns["x"].shape == (4, *shape)
    assert (got.columns["x"] == sent.columns["x"]).all()


def test_arrays_share_memory_and_are_read_only() -> None:
    sent = block(0, 0, 3)
    (got,) = from_table(to_table(sent))
    assert np.shares_memory(got.columns["x"], sent.columns["x"])


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=6), st.data())
def test_tables_may_be_joined_and_cut_at_will(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    sent = [block(logical, 10 * i, count, shape=(2,)) for i, (logical, count) in enumerate(sizes)]
    joined = pa.concat_tables([to_table(one) for one in sent])
    if data.draw(st.booleans()):
        joined = joined.combine_chunks()
    cut = data.draw(st.integers(0, joined.num_rows))
    got = [one for table in (joined[:cut], joined[cut:]) for one in from_table(table)]
    rows = [(one.logical, int(row)) for one in got for row in one.rows]
    assert rows == [(one.logical, int(row)) for one in sent for row in one.rows]
    assert all((one.place - 2**40 == one.rows[0]) for one in got)
    assert all((one.columns["x"] == one.rows[:, None]).all() for one in got)
