from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch

from raytrain.data.batch import Batch, to_array, to_tensors
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


@pytest.mark.parametrize("values", [["a", "b"], np.array([b"x"]), np.array(["2024-01-01"], dtype="datetime64[D]"), [None]])
def test_r12_values_that_are_no_numbers_name_the_column(values: object) -> None:
    with pytest.raises(DataError, match="column 'when'"):
        to_array("arrays()", "when", values)


@pytest.mark.parametrize("values", [[[1, 2], [3]], np.array([np.zeros(2), np.zeros(3)], dtype=object)])
def test_r12_ragged_values_name_the_column(values: object) -> None:
    with pytest.raises(DataError, match="rows of different lengths") as caught:
        to_array("arrays()", "tokens", values)
    assert "column 'tokens'" in caught.value.where


def test_a_foreign_byte_order_becomes_the_native_one() -> None:
    array = to_array("arrays()", "x", np.arange(3, dtype=">i4"))
    assert array.dtype.isnative
    assert array.tolist() == [0, 1, 2]
