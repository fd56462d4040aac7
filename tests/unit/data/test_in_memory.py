from __future__ import annotations

import pickle
import random
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


OTHER_ROWS = {
    "int64 [3]": {"x": [1, 2, 3]},
    "columns y": {"y": [1, 2]},
    "type <U4: 'text'": {"x": "text"},
    "type object: None": {"x": None},
    "float64 [2]": {"x": [1.5, 2]},
}


@pytest.mark.parametrize("found", OTHER_ROWS)
def test_r12_a_row_unlike_row_0_is_refused_by_its_number(found: str) -> None:
    rows = [{"x": [1, 2]}] * 20
    rows[17] = OTHER_ROWS[found]  # not among those that are checked at once
    with pytest.raises(DataError, match=r"dataset\(Listed\), row 17") as caught:
        dataset(Listed(*rows)).take(np.array([3, 17]))
    assert found in str(caught.value)


def test_r12_a_row_of_a_dataset_is_widened_only_where_it_stays_exact() -> None:
    rows = [{"x": 1.5, "id": 2**53 + 1, "small": np.float16(1)}] * 6
    rows[1] = {"x": 2**53, "id": np.int8(3), "small": np.uint8(255)}
    assert dataset(Listed(*rows)).take(np.array([1]))["x"].tolist() == [2**53]
    rows[1] = rows[1] | {"x": 2**53 + 1}
    with pytest.raises(DataError, match=r"row 1, column 'x'\n.*int64 \[\]: 9007199254740993"):
        dataset(Listed(*rows)).take(np.array([1]))


def test_r12_a_few_rows_are_checked_where_a_dataset_is_given() -> None:
    with pytest.raises(DataError, match="row 9, column 'x'"):
        dataset(Listed(*[{"x": 1}] * 9, {"x": None}))


def test_columns_of_a_dataset_that_are_no_numbers_are_left_out_with_their_type() -> None:
    source = dataset(Listed((1, "a.png", None), (2, "b.png", 5)))
    assert source.take(np.array([1])) == {"0": [2]}
    assert source.left_out == {"1": "type <U5: 'a.png'", "2": "type object: None"}
    with pytest.raises(DataError, match=r"1 \(type <U1: 'b'\)"):
        dataset(Listed({"1": "b"}))


def test_r12_a_dataset_column_has_the_type_of_row_0_in_every_batch() -> None:
    assert dataset(Listed({"x": 1.5}, {"x": 2})).take(np.array([1]))["x"].dtype == np.float64


def test_r12_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="0 rows"):
        dataset(Listed())


def noisy_row(row: int = 0) -> dict[str, Any]:
    """Numbers from the generators of torch, numpy and Python."""
    return {"row": row, "torch": torch.rand(4), "numpy": np.random.rand(4), "python": [random.random() for _ in range(4)]}


class Noisy(Listed):
    def __getitem__(self, index: int) -> Any:
        return noisy_row(index)


def noise(seed: int, epoch: int, *rows: int) -> list[dict[str, list[float]]]:
    taken = dataset(Noisy(*range(100))).take(np.array(rows), (seed, epoch))
    assert taken.pop("row").tolist() == list(rows)
    return [{name: values[i].tolist() for name, values in taken.items()} for i in range(len(rows))]


def test_r13_random_numbers_of_a_row_follow_from_seed_epoch_and_row_alone() -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    first, second = noise(7, 1, 5, 80)
    torch.manual_seed(4), np.random.seed(4), random.seed(4)
    assert noise(7, 1, 80, 2, 5, 80) == [second, noise(7, 1, 2)[0], first, second]
    for name, numbers in first.items():
        others = [noise(7, 0, 5)[0], noise(7, 2, 5)[0], noise(8, 1, 5)[0], second]
        assert len({tuple(other[name]) for other in others} | {tuple(numbers)}) == 5


def test_reading_rows_leaves_the_random_generators_as_they_were() -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = noisy_row()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    noise(7, 1, 5, 80)
    assert str(noisy_row()) == str(expected)


def test_a_dataset_with_a_random_generator_of_its_own_is_refused() -> None:
    class Own(Listed):
        generator = np.random.default_rng(0)

        def __getitem__(self, index: int) -> Any:
            return {"x": 1, "y": self.generator.random()}

    with pytest.raises(DataError, match=r"column 'y'\n.*differs each time it is read") as caught:
        dataset(Own(*range(9)))
    assert "np.random.default_rng(np.random.randint(2**31))" in caught.value.fix
