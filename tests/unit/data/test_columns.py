from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from raytrain.data.columns import check_types, is_tensor, to_array
from raytrain.data.source import Columns
from raytrain.errors import DataError


def test_what_ray_data_processes_import_of_ours_does_not_import_torch() -> None:
    code = "import sys, raytrain.data, raytrain.data.ray_reader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tensors_become_arrays() -> None:
    assert is_tensor(torch.zeros(2))
    assert not is_tensor(np.zeros(2))
    assert to_array("arrays()", "x", torch.ones(2, requires_grad=True)).tolist() == [1, 1]


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


@pytest.mark.parametrize(
    "later", [{"x": np.zeros((2, 3), "f8")}, {"x": np.zeros((2, 4), "f4")}, {"y": np.zeros((2, 3), "f4")}]
)
def test_r12_a_column_that_changes_type_or_shape_is_refused(later: Columns) -> None:
    types: dict[str, Any] = {}
    check_types(types, {"x": np.zeros((5, 3), "f4")})
    check_types(types, {"x": np.zeros((2, 3), "f4")})
    with pytest.raises(DataError, match=r"column '[xy]'"):
        check_types(types, later)
