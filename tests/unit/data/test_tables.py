from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest

from raytrain.data.arrow import decode, dtype_of
from raytrain.data.given import as_source
from raytrain.data.in_memory import DatasetSource
from raytrain.data.tables import HuggingFaceSource, RayDatasetSource, huggingface, ray
from raytrain.errors import DataError
from tests.golden import check

ROWS = np.array([7, 0, 7, 19])


def some_rows(num_rows: int = 20) -> dict[str, Any]:
    ids = range(num_rows)
    return {
        "id": list(ids),
        "pair": [[i / 2, i / 4] for i in ids],
        "flag": [i % 2 == 0 for i in ids],
        "text": ["a"] * num_rows,
    }


def test_rows_of_hugging_face_are_its_numbers_and_lists_with_their_types(tmp_path: Path) -> None:
    stored = datasets.Dataset.from_dict(some_rows()).cast_column("pair", datasets.Sequence(datasets.Value("float32")))
    stored.save_to_disk(tmp_path / "stored")
    for given in (stored, datasets.load_from_disk(tmp_path / "stored")):
        source = pickle.loads(pickle.dumps(huggingface(given)))
        taken = source.take(ROWS)
        assert taken["id"].tolist() == ROWS.tolist()
        assert taken["pair"].tolist() == [[row / 2, row / 4] for row in ROWS]
        assert [str(taken[name].dtype) for name in source.columns] == ["int64", "float32", "bool"]
        assert source.left_out == {"text": "type string"}
        assert all(values.flags.writeable for values in taken.values())
        assert source.take(ROWS[:0])["pair"].shape == (0, 2)


def test_hugging_face_rows_are_those_after_filter_shuffle_and_select() -> None:
    given = datasets.Dataset.from_dict(some_rows()).filter(lambda row: row["flag"]).shuffle(seed=3).select(range(6))
    source = huggingface(given)
    assert source.take(np.arange(6))["id"].tolist() == given["id"][:]
    assert huggingface(given.with_format("torch", columns=["id"])).columns == ("id",)
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda i: source.take(np.array([i % 6]))["id"].tolist(), range(200)))
    assert [part[0] for part in parts] == given["id"][:] * 33 + given["id"][:2]


def test_r9_the_fingerprint_of_hugging_face_tells_order_and_values() -> None:
    given = datasets.Dataset.from_dict(some_rows())
    same, other = datasets.Dataset.from_dict(some_rows()), datasets.Dataset.from_dict(some_rows() | {"id": [1] * 20})
    facts = [huggingface(one).fingerprint() for one in (given, same, other, given.shuffle(seed=1), given.shuffle(seed=2))]
    assert facts[0] == facts[1]
    assert len({str(one) for one in facts}) == 4


def test_a_column_of_tensors_keeps_its_shape() -> None:
    features = datasets.Features({"x": datasets.Array2D((2, 3), "float32")})
    values = np.arange(24, dtype="f4").reshape(4, 2, 3)
    taken = huggingface(datasets.Dataset.from_dict({"x": list(values)}, features=features)).take(np.array([2, 1]))
    assert (taken["x"] == values[[2, 1]]).all()


def test_a_hugging_face_dataset_is_taken_as_what_it_is() -> None:
    given = datasets.Dataset.from_dict(some_rows())
    assert isinstance(as_source("data", given), HuggingFaceSource)
    given.set_transform(lambda rows: {"id": rows["id"]})
    assert isinstance(as_source("data", given), DatasetSource)


def blocks(*sizes: int) -> RayDatasetSource:
    return RayDatasetSource(["ref"] * len(sizes), [(rows, rows * 2**20, "") for rows in sizes], {}, {})


def test_pieces_of_blocks_are_the_chunks_so_that_a_window_fits_in_memory() -> None:
    assert blocks(20, 3).chunk_rows == (8, 8, 4, 3)
    assert RayDatasetSource(["ref"], [(5, 2**30, "")], {}, {}).chunk_rows == (1,) * 5


def test_arrow_types_of_numbers_in_extensions_are_known() -> None:
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((3, 2, 2), "f4"))
    assert dtype_of(tensor.type) == np.dtype("f4")
    assert decode(tensor).shape == (3, 2, 2)


def with_transform() -> Any:
    given = datasets.Dataset.from_dict({"x": [1]})
    given.set_transform(lambda rows: rows)
    return given


REFUSED = {
    "huggingface_splits": lambda: huggingface(datasets.DatasetDict(train=datasets.Dataset.from_dict({"x": [1]}))),
    "huggingface_transform": lambda: huggingface(with_transform()),
    "huggingface_text": lambda: huggingface(datasets.Dataset.from_dict({"text": ["a"], "name": ["b"]})),
    "huggingface_empty": lambda: huggingface(datasets.Dataset.from_dict({"x": [1]}).select([])),
    "huggingface_path": lambda: huggingface("imdb"),
    "huggingface_stream": lambda: huggingface(datasets.Dataset.from_dict({"x": [1]}).to_iterable_dataset()),
    "huggingface_ragged": lambda: huggingface(datasets.Dataset.from_dict({"x": [[1], [2, 3]]})).take(np.arange(2)),
    "huggingface_lengths": lambda: huggingface(datasets.Dataset.from_dict({"x": [[1], [2, 3]]})).take(np.array([1])),
    "huggingface_nulls": lambda: huggingface(datasets.Dataset.from_dict({"x": [1, None]})).take(np.arange(2)),
    "ray_path": lambda: ray("s3://bucket"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_rows_of_numbers_is_refused(case: str) -> None:
    with pytest.raises(DataError) as refused:
        REFUSED[case]()
    check(f"errors/{case}.txt", f"{refused.value}\n")
