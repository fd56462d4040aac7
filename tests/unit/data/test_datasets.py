from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from raytrain.data.datasets import dataset
from raytrain.errors import DataError


class Listed:
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_tuples_become_numbered_columns() -> None:
    source = dataset(TensorDataset(torch.arange(12.0).reshape(4, 3), torch.arange(4)))
    assert (source.num_rows, source.columns, source.chunk_rows) == (4, ("0", "1"), None)
    taken = source.take(np.array([3, 1]))
    assert taken["0"].tolist() == [[9, 10, 11], [3, 4, 5]]
    assert taken["1"].tolist() == [3, 1]
    assert (taken["0"].dtype, taken["1"].dtype) == (np.float32, np.int64)


def test_mappings_of_tensors_arrays_and_numbers_keep_their_names() -> None:
    row = {"x": torch.zeros(2), "y": np.float32(1), "z": 2, "ok": True}
    taken = dataset(Listed(row, row)).take(np.array([0, 1]))
    assert {name: (str(v.dtype), v.shape) for name, v in taken.items()} == {
        "x": ("float32", (2, 2)),
        "y": ("float32", (2,)),
        "z": ("int64", (2,)),
        "ok": ("bool", (2,)),
    }


def test_r12_one_type_per_column_in_every_batch() -> None:
    source = dataset(Listed({"x": 1.5}, {"x": 2}))
    assert source.take(np.array([1]))["x"].dtype == np.float64
    with pytest.raises(DataError, match="column 'x'"):
        dataset(Listed({"x": 2}, {"x": 1.5})).take(np.array([1]))


@pytest.mark.parametrize("other", [{"x": [1, 2, 3]}, {"y": [1, 2]}, {"x": "text"}])
def test_r12_a_row_unlike_row_0_is_refused(other: dict[str, Any]) -> None:
    source = dataset(Listed({"x": [1, 2]}, other))
    with pytest.raises(DataError, match=r"dataset\(Listed\)"):
        source.take(np.array([0, 1]))


def test_r12_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="0 rows"):
        dataset(Listed())


def test_no_rows_can_be_taken() -> None:
    assert dataset(Listed({"x": [1, 2]})).take(np.array([], dtype=np.int64))["x"].shape == (0, 2)
