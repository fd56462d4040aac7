"""Values that people give where a source is expected: taken as what they clearly are, or refused with the right line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from raytrain.data.given import as_source
from raytrain.data.in_memory import arrays, dataset
from raytrain.errors import DataError

ROWS = TensorDataset(torch.arange(6.0).reshape(3, 2), torch.tensor([5, 6, 2**53 + 1]))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class OwnRows:
    """A class that has rows by number, and no base class."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, 2**53 + index


def as_lists(value: Any) -> dict[str, Any]:
    source = as_source("Digits.data, source 'train'", value)
    return {name: values.tolist() for name, values in source.take(np.arange(source.num_rows)).items()}


HUGGING_FACE = datasets.Dataset.from_dict(
    {"x": [[0.5, index] for index in range(3)], "label": range(3), "text": ["a", "b", "c"]}
)
TENSOR_ROWS = {"0": [[0, 1], [2, 3], [4, 5]], "1": [5, 6, 2**53 + 1]}
TAKEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "a source": (arrays(x=[1, 2]), {"x": [1, 2]}),
    "a dictionary of columns": (
        {"x": torch.ones(2), "y": [1, 2], "z": np.array([3, 4])},
        {"x": [1, 1], "y": [1, 2], "z": [3, 4]},
    ),
    "TensorDataset": (ROWS, TENSOR_ROWS),
    "Subset": (Subset(ROWS, [2, 0]), {"0": [[4, 5], [0, 1]], "1": [2**53 + 1, 5]}),
    "ConcatDataset": (ConcatDataset([ROWS, ROWS]), {"0": TENSOR_ROWS["0"] * 2, "1": TENSOR_ROWS["1"] * 2}),
    "a class with rows by number": (OwnRows(), {"0": [0, 1, 2], "1": [2**53, 2**53 + 1, 2**53 + 2]}),
    "Hugging Face": (HUGGING_FACE, {"x": [[0.5, 0], [0.5, 1], [0.5, 2]], "label": [0, 1, 2]}),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_what_has_numbered_rows_is_taken_exactly(kind: str) -> None:
    value, expected = TAKEN[kind]
    assert as_lists(value) == expected


def test_a_data_frame_is_taken_and_columns_that_are_no_numbers_are_left_out_with_their_type() -> None:
    frame = pd.DataFrame(
        {"id": [2**53 + 1, 2], "x": [0.5, float("nan")], 7: pd.array([1, 2], dtype="Int64"), "pair": [[1, 2], [3, 4]]}
    )
    frame = frame.assign(name=["a", "b"], when=pd.Timestamp("2024-01-01"), raw=[b"a", None]).set_index(pd.Index([9, 8]))
    source = as_source("here", frame)
    taken = source.take(np.arange(2))
    assert {name: values.tolist() for name, values in taken.items() if name != "x"} == {
        "id": [2**53 + 1, 2],
        "7": [1, 2],
        "pair": [[1, 2], [3, 4]],
    }
    assert np.isnan(taken["x"][1])
    assert source.left_out.keys() == {"name", "when", "raw"}
    assert "datetime64" in source.left_out["when"]


@pytest.mark.parametrize(
    ("frame", "found"),
    [
        (pd.DataFrame({"x": pd.array([2**53 + 1, None], dtype="Int64")}), "1 nulls"),
        (pd.DataFrame({"x": ["a"]}), r"x \(type object: 'a'\)"),
        (pd.DataFrame([[1, 2]], columns=["x", "x"]), "columns x, x"),
        (pd.DataFrame({"x": []}), "0 rows in x"),
        (pd.DataFrame(), "no columns"),
    ],
)
def test_r12_a_data_frame_that_cannot_become_tensors_is_refused(frame: pd.DataFrame, found: str) -> None:
    with pytest.raises(DataError, match=found):
        as_source("here", frame)


WEIGHTED = WeightedRandomSampler([1.0, 2.0, 3.0], 3)
REFUSED: dict[str, tuple[Any, str, str]] = {
    "DataLoader": (
        DataLoader(ROWS, 2, shuffle=True),
        "torch.utils.data.dataloader.DataLoader\n",
        "raytrain.dataset(loader.dataset)",
    ),
    "sampler": (
        DataLoader(ROWS, 2, sampler=WEIGHTED),
        "with sampler WeightedRandomSampler\n",
        "weights of a sampler go into `loss`",
    ),
    "batch sampler": (
        DataLoader(ROWS, batch_sampler=type("Bucketed", (BatchSampler,), {})(SequentialSampler(ROWS), 2, False)),
        "with batch_sampler Bucketed\n",
        "raytrain.dataset(loader.dataset)",
    ),
    "collate function": (
        DataLoader(ROWS, 2, collate_fn=as_lists),
        "with collate_fn as_lists\n",
        "what collate_fn does to rows into __getitem__",
    ),
    "DataLoader of a stream": (DataLoader(Stream()), "DataLoader\n", "raytrain.dataset(list(rows))"),
    "IterableDataset": (Stream(), "test_given.Stream\n", "raytrain.parquet(path)"),
    "generator": ((row for row in [1]), "generator\n", "raytrain.dataset(list(rows))"),
    "Dataset without a length": (NoLength(), "test_given.NoLength\n", "define __len__"),
    "array": (np.zeros((3, 2)), "numpy.ndarray\n", "raytrain.arrays(x=values)"),
    "tensor": (torch.zeros(3), "torch.Tensor\n", "raytrain.arrays(x=values)"),
    "list": ([{"x": 1}], "list\n", "raytrain.dataset(rows) for a list of rows"),
    "pair of arrays": ((np.zeros((2, 4)), np.zeros(2)), "tuple\n", "raytrain.arrays(x=..., y=...) for columns"),
    "path": (Path("a.parquet"), "pathlib", "raytrain.parquet(path)"),
    "text": ("s3://rows", "str\n", "raytrain.parquet(path)"),
    "Arrow table": (pa.table({"x": [1]}), "pyarrow.lib.Table\n", "value.to_pandas()"),
    "None": (None, "NoneType\n", "raytrain.arrays(x=...)"),
    "function": (dataset, "function\n", "raytrain.dataset(rows)"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_numbered_rows_is_refused_with_the_line_to_write(kind: str) -> None:
    value, found, line = REFUSED[kind]
    with pytest.raises(DataError) as caught:
        as_source("Digits.data, source 'train'", value)
    assert caught.value.where == "Digits.data, source 'train'"
    assert found in caught.value.value + "\n"
    assert line in caught.value.fix


@pytest.mark.parametrize(
    "kind", ["DataLoader", "IterableDataset", "Dataset without a length", "array", "pair of arrays", "path"]
)
def test_what_has_no_numbered_rows_is_no_dataset_either(kind: str) -> None:
    value, _, line = REFUSED[kind]
    with pytest.raises(DataError) as caught:
        dataset(value)
    assert caught.value.where == "dataset()"
    assert line in caught.value.fix


def test_a_list_of_rows_is_a_dataset_where_it_is_called_one() -> None:
    assert dataset([{"x": 1}, {"x": 2}]).take(np.arange(2))["x"].tolist() == [1, 2]
