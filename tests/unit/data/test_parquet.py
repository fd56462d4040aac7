from __future__ import annotations

import datetime
import decimal
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from raytrain.data.parquet import ParquetSource, parquet
from raytrain.errors import DataError
from tests import golden


def write(path: Path, group_rows: int = 4, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=group_rows)
    return path


def everything(source: ParquetSource) -> dict[str, list[Any]]:
    return {name: values.tolist() for name, values in source.take(np.arange(source.num_rows)).items()}


def refused(path: Any, *parts: str, **settings: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        everything(parquet(path, **settings))
    text = str(caught.value)
    assert all(part in text for part in parts), text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    return caught.value


def test_chunks_are_the_row_groups_with_rows_in_order_of_file_names(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", id=[7, 8])
    write(tmp_path / "a.parquet", id=[0, 1, 2, 3, 4, 5, 6])
    write(tmp_path / "sub" / "empty.parquet", id=pa.array([], pa.int64()))
    write(tmp_path / "_hidden" / "c.parquet", id=[100])
    source = parquet(tmp_path)
    assert source.chunk_rows == (4, 3, 2)
    assert everything(source) == {"id": list(range(9))}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 29), max_size=40))
def test_rows_are_taken_in_the_asked_order_also_twice(tmp_path_factory: pytest.TempPathFactory, rows: list[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "thirty.parquet"
    if not path.exists():
        write(path, group_rows=7, id=range(30), x=[[i, -i] for i in range(30)])
    taken = parquet(path).take(np.array(rows, dtype=np.int64))
    assert taken["id"].tolist() == rows
    assert taken["x"].tolist() == [[i, -i] for i in rows]


def test_only_the_needed_row_groups_are_read_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = parquet(write(tmp_path / "a.parquet", group_rows=3, id=range(12)))
    read: list[int] = []
    original = pq.ParquetFile.read_row_group

    def spy(self: Any, group: int, **kwargs: Any) -> Any:
        read.append(group)
        return original(self, group, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy)
    assert source.take(np.array([11, 3, 10, 4]))["id"].tolist() == [11, 3, 10, 4]
    assert sorted(read) == [1, 3]
    source.take(np.array([5, 9]))
    assert sorted(read) == [1, 3]


def test_values_are_not_read_to_build_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet", id=range(12))
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", None)
    assert parquet(tmp_path).num_rows == 12


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32"])
def test_types_are_kept(tmp_path: Path, dtype: str) -> None:
    values = np.array([0, 1, 1, 0, 1], dtype=dtype)
    taken = parquet(write(tmp_path / "a.parquet", x=values)).take(np.arange(5))
    assert taken["x"].dtype == dtype
    assert (taken["x"] == values).all()


def test_r12_fixed_size_lists_and_rectangular_nested_lists_become_tensors(tmp_path: Path) -> None:
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(range(12), pa.int32()), 2)
    nested = pa.array([[[i, i], [i, i], [i, 0]] for i in range(6)], pa.list_(pa.list_(pa.float32())))
    taken = parquet(write(tmp_path / "a.parquet", fixed=fixed, nested=nested)).take(np.array([5, 0]))
    assert taken["fixed"].dtype == np.int32
    assert taken["fixed"].tolist() == [[10, 11], [0, 1]]
    assert taken["nested"].shape == (2, 3, 2)
    assert taken["nested"][0].tolist() == [[5, 5], [5, 5], [5, 0]]


RAGGED = {
    "a later row group": ([[1, 2]] * 4 + [[1, 2, 3]], "row group 1"),
    "right number of values": ([[1, 2]] * 4 + [[1], [1, 2, 3]], "lists of 1 to 3 values"),
    "a whole file": ([[1, 2, 3]], "values in 1 rows"),
    "nulls in a list": ([[1, 2], [3, None]], "1 nulls"),
}


@pytest.mark.parametrize("case", RAGGED)
def test_r12_lists_of_another_length_or_with_nulls_name_file_and_column(tmp_path: Path, case: str) -> None:
    values, found = RAGGED[case]
    write(tmp_path / "a.parquet", x=[[1, 2]] * 6)
    bad = write(tmp_path / "b.parquet", x=values)
    refused(tmp_path, str(bad), "column 'x'", found)


def test_r12_nested_lists_of_another_shape_in_another_file_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", x=[[[1, 2], [3, 4]]])
    bad = write(tmp_path / "b.parquet", x=[[[1], [2], [3], [4]]])
    refused(tmp_path, str(bad), "column 'x'", "rows of shape [4, 1]")


UNFIT = {
    "when": [datetime.datetime(2024, 1, 1)],
    "day": [datetime.date(2024, 1, 1)],
    "price": [decimal.Decimal("1.5")],
    "name": ["a"],
    "raw": [b"a"],
    "pair": [{"a": 1}],
    "words": [["a", "b"]],
}


def test_r12_columns_that_are_not_numbers_are_left_out_with_the_reason(tmp_path: Path) -> None:
    source = parquet(write(tmp_path / "a.parquet", id=[3], **UNFIT))
    assert everything(source) == {"id": [3]}
    assert source.left_out.keys() == UNFIT.keys()
    assert "timestamp" in source.left_out["when"]


@pytest.mark.parametrize("name", UNFIT)
def test_r12_a_column_that_is_not_numbers_is_refused_if_asked_for(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "a.parquet", id=[3], **UNFIT)
    refused(path, f"column '{name}'", str(path), columns=["id", name])


def test_r12_a_missing_column_names_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", label=[3], x=[1])
    refused(path, "no column 'labels'", "did you mean 'label'?", columns=["labels"])


def test_r12_partition_keys_keep_one_type_and_text_keys_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "year=2023" / "lang=de" / "a.parquet", id=[0, 1])
    write(tmp_path / "year=2024" / "lang=7" / "a.parquet", id=[2])
    source = parquet(tmp_path)
    assert everything(source) == {"id": [0, 1, 2], "year": [2023, 2023, 2024]}
    assert source.take(np.array([2]))["year"].dtype == np.int64
    assert "lang" in source.left_out


def test_r12_partition_keys_are_found_with_globs_and_lists(tmp_path: Path) -> None:
    files = [write(tmp_path / f"year={year}" / "a.parquet", id=[year]) for year in (2023, 2024)]
    wanted = {"id": [2023, 2024], "year": [2023, 2024]}
    assert everything(parquet(str(tmp_path / "year=*" / "*.parquet"))) == wanted
    assert everything(parquet(files)) == wanted


@pytest.mark.parametrize("damage", ["empty", "truncated", "text"])
def test_r12_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    write(tmp_path / "a.parquet", id=[1, 2])
    bad = write(tmp_path / "b.parquet", id=[3, 4])
    whole = bad.read_bytes()
    bad.write_bytes({"empty": b"", "truncated": whole[: len(whole) // 2], "text": b"hello world!"}[damage])
    error = refused(tmp_path, str(bad))
    assert "Parquet file" in error.rule


def test_r12_a_file_that_is_damaged_later_is_named_when_read(tmp_path: Path) -> None:
    bad = write(tmp_path / "a.parquet", id=[1, 2])
    source = parquet(tmp_path)
    bad.unlink()
    with pytest.raises(DataError, match=str(bad)):
        source.take(np.array([0]))


def test_r12_a_column_that_is_in_some_files_only_names_file_and_column(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", id=[1], extra=[2])
    without = write(tmp_path / "b.parquet", id=[3])
    refused(tmp_path, "column 'extra'", str(without))
    assert everything(parquet(tmp_path, columns=["id"])) == {"id": [1, 3]}


def test_r12_a_column_of_two_number_types_has_the_wider_one_in_every_batch(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", x=pa.array([1, 2], pa.int32()))
    write(tmp_path / "b.parquet", x=pa.array([0.5], pa.float32()))
    source = parquet(tmp_path)
    assert [source.take(np.array(rows))["x"].dtype for rows in ([0], [2], [1, 2])] == [np.float64] * 3


@pytest.mark.parametrize(
    ("one", "other", "wider"),
    [("int64", "float64", ""), ("uint64", "int64", ""), ("uint64", "float32", ""), ("int16", "float16", "float32")],
)
def test_r12_types_are_widened_only_where_every_value_stays_exact(tmp_path: Path, one: str, other: str, wider: str) -> None:
    first = write(tmp_path / "a.parquet", x=np.array([np.iinfo(one).max], one))
    second = write(tmp_path / "b.parquet", x=np.array([1], other))
    if wider:
        assert parquet(tmp_path).take(np.arange(2))["x"].tolist() == [np.iinfo(one).max, 1]
    else:
        with pytest.raises(DataError, match="float64 rounds large integers") as caught:
            parquet(tmp_path)
        assert caught.value.where == "data, column 'x'"
        assert caught.value.value == f"{one} in {first}, {other} in {second}"


@pytest.mark.parametrize("other", [{"x": [[1]]}, {"x": [1.5], "y": [[2]]}])
def test_r12_lists_in_one_file_and_numbers_in_another_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    write(tmp_path / "a.parquet", x=[1.5], y=[2])
    bad = write(tmp_path / "b.parquet", **{"y": [2]} | other)
    with pytest.raises(DataError, match=f"of {bad}\n.*type list<"):
        parquet(tmp_path)


def test_r12_a_partition_key_that_is_a_column_in_some_files_is_refused(tmp_path: Path) -> None:
    key = write(tmp_path / "year=2023" / "a.parquet", id=[0])
    column = write(tmp_path / "b.parquet", id=[1], year=[2024])
    refused(tmp_path, "column 'year'", f"a partition key in {key}", f"a column in all files, as in {column}")


NULLS = {
    "numbers": ([1.0, 2.0, 3.0, 4.0, 5.0, None, None], "2 nulls, first in row 1 of the row group"),
    "in lists": ([[1, 2]] * 5 + [[1, None], [1, 2]], "1 nulls inside of lists, first in row 1"),
    "lists of lists": ([[[1], [2]]] * 6 + [[[1], [None]]], "1 nulls inside of lists, first in row 2"),
    "ragged": ([[1, 2]] * 5 + [[1], [1, 2, 3]], "lists of 1 to 3 values, first in row 1"),
}


@pytest.mark.parametrize("case", NULLS)
def test_r12_nulls_in_the_middle_name_row_group_and_row(tmp_path: Path, case: str) -> None:
    values, found = NULLS[case]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": values}), path, row_group_size=4, write_statistics=False)
    refused(path, f"column 'x' of {path}, row group 1", found)


@pytest.mark.parametrize("statistics", [True, False])
def test_r12_nulls_name_file_column_and_count(tmp_path: Path, statistics: bool) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2, 3], "x": [1.0, None, None]}), path, write_statistics=statistics)
    refused(path, str(path), "column 'x'", "2 nulls")
    if statistics:
        with pytest.raises(DataError, match="2 nulls"):  # by the footer alone
            parquet(path)
    assert everything(parquet(path, columns=["id"])) == {"id": [1, 2, 3]}


@pytest.mark.parametrize("name", ["nothing.parquet", "nothing", "none-*.parquet"])
def test_a_missing_path_is_named(tmp_path: Path, name: str) -> None:
    assert refused(tmp_path / name, str(tmp_path / name)).where == "data"


def test_r12_paths_without_files_or_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    refused(tmp_path, "has Parquet files")
    write(tmp_path / "a.parquet", id=pa.array([], pa.int64()))
    refused(tmp_path, "0 rows in 1 files")
    refused([], "at least one path")
    refused(None, "NoneType", "is a path or URI")
    refused([tmp_path, pa.table({"id": [1]})], "Table", "is a path or URI")


def test_other_filesystems_and_uris(tmp_path: Path) -> None:
    write(tmp_path / "d" / "a.parquet", id=[5])
    assert everything(parquet("d", filesystem=fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()))) == {"id": [5]}
    assert everything(parquet(f"file://{tmp_path}/d")) == {"id": [5]}


def test_names_with_dots_and_dictionary_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", **{"a.b": [[1, 2], [3, 4]], "a": pa.array([7, 8]).dictionary_encode()})
    assert everything(parquet(path)) == {"a.b": [[1, 2], [3, 4]], "a": [7, 8]}


def test_it_is_cheap_to_pickle_and_reads_the_same(tmp_path: Path) -> None:
    source = parquet(write(tmp_path / "a.parquet", group_rows=1000, id=range(5000)))
    source.take(np.arange(5000))
    text = pickle.dumps(source)
    assert len(text) < 3000
    assert everything(pickle.loads(text)) == everything(source)


def test_the_fingerprint_depends_on_the_files_and_not_on_their_directory(tmp_path: Path) -> None:
    write(tmp_path / "one" / "a.parquet", id=[1, 2])
    write(tmp_path / "two" / "a.parquet", id=[1, 2])
    first = parquet(tmp_path / "one").fingerprint()
    assert parquet(tmp_path / "two").fingerprint() == first
    write(tmp_path / "two" / "b.parquet", id=[3])
    second = parquet(tmp_path / "two").fingerprint()
    assert {key for key in first if first[key] != second[key]} == {"files", "rows", "bytes", "digest"}


LISTS = [[7, 8], [], [9], [1, 2, 3], [4], [5, 6]]


def test_lists_are_padded_to_the_longest_one_and_their_lengths_are_a_column(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", tokens=pa.array(LISTS[:5], pa.list_(pa.int32())), id=range(5))
    write(tmp_path / "b.parquet", tokens=pa.array(LISTS[5:], pa.large_list(pa.uint8())), id=[5])
    source = pickle.loads(pickle.dumps(parquet(tmp_path, pad={"tokens": -1})))
    assert source.columns == ("tokens", "tokens_length", "id")
    rows = np.array([3, 5, 1, 3])
    taken = source.take(rows)
    assert [taken[name].dtype for name in source.columns] == [np.int32, np.int64, np.int64]
    assert taken["tokens"].tolist() == [(LISTS[row] + [-1] * 3)[:3] for row in rows]
    assert taken["tokens_length"].tolist() == [len(LISTS[row]) for row in rows]
    assert taken["id"].tolist() == rows.tolist()


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32()), pa.list_(pa.float32(), 2), pa.fixed_shape_tensor(pa.float32(), [2])]
)
def test_lists_of_any_kind_are_padded_to_the_length_that_is_given(tmp_path: Path, kind: pa.DataType) -> None:
    values = pa.array([[1, 2], [3, 4]], getattr(kind, "storage_type", kind))
    values = (
        pa.ExtensionArray.from_storage(kind, values)
        if isinstance(kind, pa.ExtensionType | pa.FixedShapeTensorType)
        else values
    )
    source = parquet(write(tmp_path / "a.parquet", x=values), pad={"x": (0.5, 3)})
    assert everything(source) == {"x": [[1, 2, 0.5], [3, 4, 0.5]], "x_length": [2, 2]}


def test_lists_of_one_length_that_is_given_are_not_read_to_build_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.parquet", tokens=LISTS)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", None)
    assert parquet(tmp_path, pad={"tokens": (0, 3)}).columns == ("tokens", "tokens_length")


def test_the_fingerprint_depends_on_the_value_and_the_length_of_padding(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", tokens=LISTS)
    found = [parquet(path, pad={"tokens": pad}).fingerprint() for pad in (0, (0, 3), 1, (0, 4))]
    assert found[0] == found[1]
    assert found[0]["columns"] == "tokens: int64 [3], tokens_length: int64 []"
    assert len({fingerprint["digest"] for fingerprint in found}) == 3


TABLE = {
    "tokens": LISTS,
    "id": range(6),
    "pair": [[[1]]] * 6,
    "name": ["a"] * 6,
    "small": pa.array([[1]] * 6, pa.list_(pa.uint8())),
}
UNPADDED: dict[str, tuple[dict[str, Any], Any]] = {
    "numbers": (TABLE, {"id": 0}),
    "nested": (TABLE, {"pair": 0}),
    "text": (TABLE, {"name": 0}),
    "missing": (TABLE, {"token": 0}),
    "no_value": (TABLE, {"small": -1}),
    "no_number": (TABLE, {"small": "a"}),
    "no_length": (TABLE, {"tokens": (0, 0)}),
    "name_taken": ({**TABLE, "tokens_length": range(6)}, {"tokens": 0}),
    "longer": (TABLE, {"tokens": (0, 2)}),
    "null_row": ({"tokens": [[1]] * 4 + [[1], None]}, {"tokens": 0}),
    "null_value": ({"tokens": [[1]] * 4 + [[1], [], [2, None]]}, {"tokens": 0}),
    "no_pad": (TABLE, None),
}


@pytest.mark.parametrize("case", UNPADDED)
def test_padding_that_does_not_fit_the_column_is_refused(tmp_path: Path, case: str) -> None:
    columns, pad = UNPADDED[case]
    error = refused(write(tmp_path / "a.parquet", **columns), pad=pad)
    golden.check(f"errors/pad_{case}.txt", str(error).replace(str(tmp_path), "<dir>") + "\n")
