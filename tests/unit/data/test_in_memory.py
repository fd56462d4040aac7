from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from raytrain.data.in_memory import arrays, dataset
from raytrain.errors import DataError


class Listed:
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_arrays_take_rows_of_arrays_tensors_and_lists_in_the_asked_order() -> None:
    source = pickle.loads(
        pickle.dumps(arrays(a=np.arange(6).reshape(3, 2), b=torch.tensor([1.0, 2.0, 3.0]), c=[[1], [2], [3]]))
    )
    assert (source.num_rows, source.chunk_rows, source.columns) == (3, None, ("a", "b", "c"))
    taken = source.take(np.array([2, 0]))
    assert taken["a"].tolist() == [[4, 5], [0, 1]]
    assert taken["b"].dtype == np.float32
    assert taken["c"].tolist() == [[3], [1]]
    taken["a"][:] = 9
    assert source.take(np.array([2]))["a"].tolist() == [[4, 5]]


@pytest.mark.parametrize(
    ("columns", "found"),
    [({}, "no columns"), ({"x": np.zeros((0, 4))}, "0 rows in x"), ({"x": [1, 2, 3], "y": [1, 2]}, "x: 3, y: 2")],
)
def test_r12_arrays_without_columns_or_rows_or_of_different_lengths_are_refused(columns: Any, found: str) -> None:
    with pytest.raises(DataError, match=found):
        arrays(**columns)


def test_the_fingerprint_of_arrays_differs_exactly_where_the_data_differ() -> None:
    first, same, other = arrays(x=[1, 2], y=[3, 4]), arrays(x=[1, 2], y=[3, 4]), arrays(x=[1, 2], y=[3, 5])
    assert first.fingerprint() == same.fingerprint()
    assert {key for key, value in first.fingerprint().items() if other.fingerprint()[key] != value} == {"column y"}


def test_tuples_of_a_dataset_become_numbered_columns() -> None:
    source = dataset(TensorDataset(torch.arange(12.0).reshape(4, 3), torch.arange(4)))
    assert (source.num_rows, source.columns, source.chunk_rows) == (4, ("0", "1"), None)
    taken = source.take(np.array([3, 1]))
    assert taken["0"].tolist() == [[9, 10, 11], [3, 4, 5]]
    assert taken["1"].tolist() == [3, 1]
    assert (taken["0"].dtype, taken["1"].dtype) == (np.float32, np.int64)


def test_mappings_of_a_dataset_keep_their_names() -> None:
    row = {"x": torch.zeros(2), "y": np.float32(1), "z": 2, "ok": True}
    source = dataset(Listed(row, row))
    found = {name: (str(v.dtype), v.shape) for name, v in source.take(np.array([0, 1])).items()}
    assert found == {"x": ("float32", (2, 2)), "y": ("float32", (2,)), "z": ("int64", (2,)), "ok": ("bool", (2,))}
    assert source.take(np.array([], dtype=np.int64))["x"].shape == (0, 2)


@pytest.mark.parametrize("other", [{"x": [1, 2, 3]}, {"y": [1, 2]}, {"x": "text"}, {"x": [1.5, 2]}])
def test_r12_a_row_unlike_row_0_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"dataset\(Listed\)"):
        dataset(Listed({"x": [1, 2]}, other)).take(np.array([0, 1]))


def test_r12_a_dataset_column_has_the_type_of_row_0_in_every_batch() -> None:
    assert dataset(Listed({"x": 1.5}, {"x": 2})).take(np.array([1]))["x"].dtype == np.float64


def test_r12_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="0 rows"):
        dataset(Listed())
