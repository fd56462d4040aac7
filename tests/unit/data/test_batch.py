from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch

from raytrain.data.batch import Batch, rows_to_tensors, to_tensors
from raytrain.errors import DataError


def test_a_missing_column_names_the_nearest_one() -> None:
    batch = to_tensors({"pixels": np.zeros((2, 3)), "label": np.zeros(2)})
    with pytest.raises(DataError, match="did you mean 'label'") as caught:
        batch["lable"]
    assert "pixels, label" in caught.value.rule
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_get_and_in_do_not_raise_for_a_missing_column() -> None:
    batch = Batch(x=torch.zeros(1))
    assert batch.get("y") is None
    assert "y" not in batch


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float16", "float32", "float64"])
def test_tensors_keep_the_type_and_share_memory_with_writable_arrays(dtype: str) -> None:
    values = np.ones((4, 2), dtype=dtype)
    tensor = to_tensors({"x": values})["x"]
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert tensor.data_ptr() == values.ctypes.data


def test_read_only_arrays_are_copied_without_a_warning() -> None:
    values = np.arange(3)
    values.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = to_tensors({"x": values})["x"]
    tensor[0] = 7
    assert values.tolist() == [0, 1, 2]


def test_tensors_of_some_rows_share_no_memory() -> None:
    values = np.arange(6)
    tensor = rows_to_tensors({"x": values}, slice(2, 4))["x"]
    assert tensor.tolist() == [2, 3]
    tensor.zero_()
    assert values.tolist() == list(range(6))
