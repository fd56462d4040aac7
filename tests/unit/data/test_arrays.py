from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from raytrain.data.arrays import arrays
from raytrain.errors import DataError


def test_arrays_tensors_and_lists_become_columns_and_rows_are_taken_in_the_asked_order() -> None:
    source = arrays(a=np.arange(6).reshape(3, 2), b=torch.tensor([1.0, 2.0, 3.0]), c=[[1], [2], [3]])
    assert (source.num_rows, source.chunk_rows, source.columns) == (3, None, ("a", "b", "c"))
    taken = source.take(np.array([2, 0]))
    assert taken["a"].tolist() == [[4, 5], [0, 1]]
    assert taken["b"].dtype == np.float32
    assert taken["c"].tolist() == [[3], [1]]


def test_what_is_taken_may_be_written_to() -> None:
    source = arrays(a=np.arange(3))
    source.take(np.array([0, 1, 2]))["a"][:] = 9
    assert source.take(np.array([1]))["a"].tolist() == [1]


def test_columns_of_different_lengths_are_named_with_their_lengths() -> None:
    with pytest.raises(DataError, match="x: 3, y: 2"):
        arrays(x=np.zeros(3), y=np.zeros(2))


def test_r12_zero_rows_are_refused() -> None:
    with pytest.raises(DataError, match="0 rows in x"):
        arrays(x=np.zeros((0, 4)))


def test_no_columns_are_refused() -> None:
    with pytest.raises(DataError, match="no columns"):
        arrays()


def test_the_fingerprint_differs_exactly_where_the_data_differ() -> None:
    first, same, other = arrays(x=[1, 2], y=[3, 4]), arrays(x=[1, 2], y=[3, 4]), arrays(x=[1, 2], y=[3, 5])
    assert first.fingerprint() == same.fingerprint()
    differ = {key for key, value in first.fingerprint().items() if other.fingerprint()[key] != value}
    assert differ == {"column y"}


def test_it_survives_pickling() -> None:
    source = pickle.loads(pickle.dumps(arrays(x=[1, 2])))
    assert source.take(np.array([1]))["x"].tolist() == [2]
