from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from raytrain.data.source import Columns, check_types, to_array
from raytrain.errors import DataError


def test_ray_data_processes_do_not_import_torch_with_our_modules() -> None:
    code = "import sys, raytrain.data, raytrain.data.ray_reader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tensors_and_foreign_byte_orders_become_native_arrays() -> None:
    assert to_array("arrays()", "x", torch.ones(2, requires_grad=True)).tolist() == [1, 1]
    array = to_array("arrays()", "x", np.arange(3, dtype=">i4"))
    assert array.dtype.isnative
    assert array.tolist() == [0, 1, 2]


NOT_NUMBERS = [["a", "b"], np.array([b"x"]), np.array(["2024-01-01"], dtype="datetime64[D]"), [None]]
RAGGED = [[[1, 2], [3]], np.array([np.zeros(2), np.zeros(3)], dtype=object)]


@pytest.mark.parametrize(
    ("values", "found"), [(v, "type") for v in NOT_NUMBERS] + [(v, "rows of different lengths") for v in RAGGED] + [(1, "1")]
)
def test_r12_values_that_are_not_one_number_array_per_row_name_the_column(values: object, found: str) -> None:
    with pytest.raises(DataError) as caught:
        to_array("arrays()", "when", values)
    assert caught.value.where == "arrays(), column 'when'"
    assert found in caught.value.value


INEXACT = {
    "9007199254740993": [2**53 + 1, 0.5],
    "-9223372036854775807": [[1.5], [-(2**63) + 1]],
    "2 nulls": np.ma.array([1, 2, 3], mask=[0, 1, 1]),
    "1 nulls": pa.array([2**53 + 1, None]),
    "1 null": pd.Series([2**53 + 1, None], dtype="Int64"),
    "type object: None in row 2": [1, 2, None, "a"],
    "type |S21: b'x' in row 1": [1, b"x"],
    "tensor of torch.bfloat16": torch.ones(2, dtype=torch.bfloat16),
    "torch.sparse_coo": torch.eye(2).to_sparse(),
    "type float128": np.ones(2, np.longdouble),
}


@pytest.mark.parametrize("found", INEXACT)
def test_r12_values_that_a_column_cannot_hold_exactly_are_refused(found: str) -> None:
    with pytest.raises(DataError) as caught:
        to_array("arrays()", "when", INEXACT[found])
    assert found in caught.value.value


def test_numbers_of_a_list_that_stay_exact_are_taken() -> None:
    assert to_array("arrays()", "x", [2**53, 0.5, float("inf"), float("nan")])[:2].tolist() == [2**53, 0.5]
    assert to_array("arrays()", "x", [2**63 + 1, 2**63]).tolist() == [2**63 + 1, 2**63]
    assert to_array("arrays()", "x", pa.array([1, 2])).tolist() == [1, 2]
    assert to_array("arrays()", "x", torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j]


@pytest.mark.parametrize(
    "later", [{"x": np.zeros((2, 3), "f8")}, {"x": np.zeros((2, 4), "f4")}, {"y": np.zeros((2, 3), "f4")}]
)
def test_r12_a_column_that_changes_type_or_shape_is_refused(later: Columns) -> None:
    types: dict[str, Any] = {}
    check_types(types, {"x": np.zeros((5, 3), "f4")})
    check_types(types, {"x": np.zeros((2, 3), "f4")})
    with pytest.raises(DataError, match=r"column '[xy]'"):
        check_types(types, later)
