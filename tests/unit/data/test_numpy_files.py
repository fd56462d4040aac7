from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from raytrain.data import numpy_files
from raytrain.data.in_memory import ArraySource
from raytrain.data.numpy_files import NumpySource, numpy
from raytrain.errors import DataError
from tests.golden import check

ROWS = np.array([3, 0, 3, 4])


def heatmaps(rows: int = 5, dtype: str = "float32") -> Any:
    return np.arange(rows * 6).reshape(rows, 2, 3).astype(dtype)


def save(path: Path, values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, values)
    return path


def save_rows(directory: Path, rows: Any) -> Path:
    for row, values in enumerate(rows):
        save(directory / f"{row:03}.npy", values)
    return directory


def savez(path: Path, compressed: bool = False, **members: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (np.savez_compressed if compressed else np.savez)(path, **members)
    return path


def same(source: NumpySource, **columns: Any) -> None:
    """Checks that the source has the values of these columns, also after pickling."""
    for one in (source, pickle.loads(pickle.dumps(source))):
        taken, wanted = one.take(ROWS), ArraySource(columns).take(ROWS)
        assert list(taken) == list(wanted) == list(one.columns)
        for name, values in wanted.items():
            assert (taken[name].dtype, taken[name].shape) == (values.dtype, values.shape)
            assert taken[name].tolist() == values.tolist()
            assert taken[name].flags["C_CONTIGUOUS"]
            assert taken[name].flags.writeable


LABEL = np.array([7, 8, 9, 10, 11])
ONE_OR_MANY: dict[str, Callable[[Path], dict[str, Any]]] = {
    "one file": lambda tmp: {"x": save(tmp / "x.npy", heatmaps())},
    "a directory": lambda tmp: {"x": save_rows(tmp / "x", heatmaps())},
    "a glob": lambda tmp: {"x": str(save_rows(tmp / "x", heatmaps()) / "0*.npy")},
    "a list": lambda tmp: {"x": [save(tmp / str(-row) / "row.npy", values) for row, values in enumerate(heatmaps())]},
}


@pytest.mark.parametrize("case", ONE_OR_MANY)
def test_rows_are_those_of_one_file_or_one_of_each_file_in_order(tmp_path: Path, case: str) -> None:
    same(numpy(**ONE_OR_MANY[case](tmp_path), label=save(tmp_path / "label.npy", LABEL)), x=heatmaps(), label=LABEL)


@pytest.mark.parametrize("compressed", [False, True])
def test_members_of_archives_are_columns_with_all_rows_or_with_one_row(tmp_path: Path, compressed: bool) -> None:
    same(numpy(savez(tmp_path / "a.npz", compressed, x=heatmaps(), label=LABEL)), x=heatmaps(), label=LABEL)
    for row in range(5):
        savez(tmp_path / "rows" / f"{row}.npz", compressed, x=heatmaps()[row], label=LABEL[row])
    same(numpy(tmp_path / "rows"), x=heatmaps(), label=LABEL)
    same(numpy(tmp_path / "rows", y=save(tmp_path / "y.npy", LABEL)), x=heatmaps(), label=LABEL, y=LABEL)


@pytest.mark.parametrize("stored", [">f4", ">i8", "?", "c8", "f2", "u1"])
@pytest.mark.parametrize("layout", [np.ascontiguousarray, np.asfortranarray])
def test_other_byte_orders_and_fortran_order_have_the_same_values(tmp_path: Path, stored: str, layout: Any) -> None:
    values = layout(heatmaps(dtype=stored))
    native = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("=")))
    same(numpy(x=save(tmp_path / "x.npy", values)), x=native)
    same(numpy(savez(tmp_path / "x.npz", odd=np.zeros((5, 1), "u1"), x=values)), odd=np.zeros((5, 1), "u1"), x=native)
    same(numpy(x=save_rows(tmp_path / "x", [layout(row) for row in values])), x=native)


def test_rows_may_hold_no_values(tmp_path: Path) -> None:
    empty = np.zeros((5, 0, 3), "float32")
    same(numpy(x=save(tmp_path / "x.npy", empty)), x=empty)
    assert numpy(x=tmp_path / "x.npy").take(np.array([], dtype=np.int64))["x"].shape == (0, 0, 3)


@pytest.mark.parametrize("dtype", ["<f4", ">f4"])
@pytest.mark.parametrize("fortran", [False, True])
def test_a_file_larger_than_memory_is_never_loaded(tmp_path: Path, dtype: str, fortran: bool) -> None:
    path, shape = tmp_path / "x.npy", (2**36, 2)  # 512 GiB; the file is sparse
    with path.open("wb") as file:
        header = {"descr": dtype, "fortran_order": fortran, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        values = file.tell()
        file.truncate(values + 2**39)
        file.seek(values + 4 * (2**35 if fortran else 2**36))
        file.write(np.array(5, dtype).tobytes())
    assert numpy(x=path).take(np.array([2**35, 2**36 - 1]))["x"].tolist() == [[5, 0], [0, 0]]


def test_values_are_not_read_to_build_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = save_rows(tmp_path / "x", heatmaps()), savez(tmp_path / "a.npz", y=LABEL)
    monkeypatch.setattr(numpy_files, "_values", None)
    monkeypatch.setattr(np, "memmap", None)
    assert numpy(given[1], x=given[0]).num_rows == 5


def test_a_compressed_member_is_decompressed_once_also_by_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = numpy(savez(tmp_path / "a.npz", compressed=True, x=LABEL))
    read = MagicMock(wraps=numpy_files._values)
    monkeypatch.setattr(numpy_files, "_values", read)
    with ThreadPoolExecutor(4) as pool:
        assert [taken["x"].tolist() for taken in pool.map(source.take, [ROWS] * 8)] == [LABEL[ROWS].tolist()] * 8
    assert read.call_count == 1


def test_hidden_files_and_others_are_not_rows_and_members_without_numbers_are_left_out(tmp_path: Path) -> None:
    rows = save_rows(tmp_path / "x", heatmaps())
    save(rows / ".hidden.npy", LABEL)
    (rows / "notes.txt").write_text("")
    assert numpy(x=rows).num_rows == 5
    name, thing = np.array(["a"] * 5), np.array([None] * 5)
    source = numpy(savez(tmp_path / "a.npz", x=heatmaps(), name=name, thing=thing))
    same(source, x=heatmaps())
    assert source.left_out == {"name": "type <U1", "thing": "type object"}
    for row in range(5):
        savez(tmp_path / "rows" / f"{row}.npz", x=LABEL[row], name="a" * row)
    same(numpy(tmp_path / "rows"), x=LABEL)


BAD: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda tmp: numpy(),
    "missing": lambda tmp: numpy(x=tmp / "x.npy"),
    "empty_directory": lambda tmp: numpy(x=tmp),
    "empty_glob": lambda tmp: numpy(tmp / "*.npz"),
    "empty_list": lambda tmp: numpy(x=[]),
    "in_memory": lambda tmp: numpy(x=LABEL),  # type: ignore[arg-type]
    "uri": lambda tmp: numpy(x="s3://bucket/x.npy"),
    "npy_without_name": lambda tmp: numpy(save(tmp / "x.npy", LABEL)),
    "npz_with_name": lambda tmp: numpy(x=savez(tmp / "x.npz", y=LABEL)),
    "no_rows": lambda tmp: numpy(x=save(tmp / "x.npy", heatmaps(0))),
    "one_number": lambda tmp: numpy(x=save(tmp / "x.npy", 3)),
    "text": lambda tmp: numpy(x=save(tmp / "x.npy", np.array(["a", "b"]))),
    "objects": lambda tmp: numpy(x=save(tmp / "x.npy", np.array([1, "a"], dtype=object))),
    "long_double": lambda tmp: numpy(x=save(tmp / "x.npy", np.zeros(3, np.longdouble))),
    "structured": lambda tmp: numpy(x=save(tmp / "x.npy", np.zeros(3, [("a", "i4")]))),
    "dates": lambda tmp: numpy(x=save(tmp / "x.npy", np.zeros(3, "datetime64[D]"))),
    "only_text": lambda tmp: numpy(savez(tmp / "x.npz", name=np.array(["a"]))),
    "truncated": lambda tmp: numpy(x=cut(save(tmp / "x.npy", heatmaps()), -4)),
    "longer": lambda tmp: numpy(x=cut(save(tmp / "x.npy", heatmaps()), 8)),
    "lengths": lambda tmp: numpy(x=save(tmp / "x.npy", LABEL), y=save(tmp / "y.npy", LABEL[1:])),
    "member_lengths": lambda tmp: numpy(savez(tmp / "x.npz", x=LABEL, y=LABEL[1:])),
    "fewer_files": lambda tmp: numpy(x=save_rows(tmp / "x", LABEL), y=save_rows(tmp / "y", LABEL[1:])),
    "other_dtype": lambda tmp: numpy(x=[save(tmp / "a.npy", LABEL), save(tmp / "b.npy", heatmaps())]),
    "other_shape": lambda tmp: numpy(x=save_rows(tmp / "x", [LABEL, LABEL[1:]])),
    "member_missing": lambda tmp: numpy([savez(tmp / "a.npz", x=LABEL, y=1), savez(tmp / "b.npz", x=LABEL)]),
    "member_added": lambda tmp: numpy([savez(tmp / "a.npz", x=LABEL), savez(tmp / "b.npz", x=LABEL, y=1)]),
    "twice": lambda tmp: numpy(savez(tmp / "a.npz", x=LABEL), x=save(tmp / "x.npy", LABEL)),
    "other_names": lambda tmp: numpy(x=save_rows(tmp / "x", LABEL[:1]), y=[save(tmp / "y" / "001.npy", 1)]),
    "unpadded": lambda tmp: numpy(x=save(tmp / "x.npy", LABEL[:3]), y=unpadded(tmp / "y")),
}


def unpadded(directory: Path) -> Path:
    """Files 9.npy to 11.npy, which are in another order by name."""
    for i in (9, 10, 11):
        save(directory / f"{i}.npy", i)
    return directory


def cut(path: Path, size_bytes: int) -> Path:
    """Truncates a file, or appends bytes."""
    whole = path.read_bytes()
    path.write_bytes(whole[:size_bytes] if size_bytes < 0 else whole + b"x" * size_bytes)
    return path


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_or_would_be_wrong_is_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises(DataError) as refused:
        BAD[case](tmp_path)
    text = str(refused.value)
    assert str(pickle.loads(pickle.dumps(refused.value))) == text
    check(f"errors/numpy_{case}.txt", f"{text}\n".replace(str(tmp_path), "TMP"))


def test_a_list_of_files_without_padded_numbers_is_in_its_own_order(tmp_path: Path) -> None:
    files = [save(tmp_path / "y" / f"{i}.npy", i) for i in range(8, 13)]
    same(numpy(x=save(tmp_path / "x.npy", LABEL), y=files), x=LABEL, y=np.arange(8, 13))
    assert numpy(y=tmp_path / "y").num_rows == 5  # alone, no other column has to agree


CHANGED: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda path: cut(path, -8),
    "other_shape": lambda path: save(path, LABEL.reshape(5, 1)),
    "other_dtype": lambda path: save(path, LABEL.astype("float64")),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("case", CHANGED)
@pytest.mark.parametrize("per_row", [False, True])
def test_a_file_that_changed_since_the_source_was_built_is_named(tmp_path: Path, case: str, per_row: bool) -> None:
    path = save(tmp_path / "x.npy", LABEL)
    source = numpy(x=[path] if per_row else path)
    CHANGED[case](path)
    with pytest.raises(DataError) as refused:
        source.take(np.array([0]))
    check(
        f"errors/numpy_changed_{case}_{'row' if per_row else 'file'}.txt", f"{refused.value}\n".replace(str(tmp_path), "TMP")
    )


def test_a_file_that_is_cut_while_it_is_mapped_kills_no_process(tmp_path: Path) -> None:
    source = numpy(x=save(tmp_path / "x.npy", np.zeros(2**20)))
    source.take(np.array([0]))
    cut(tmp_path / "x.npy", -(2**22))
    with pytest.raises(DataError, match="4194432 bytes"):
        source.take(np.array([2**20 - 1]))


@pytest.mark.parametrize("name", ["x.npy", "stored.npz", "compressed.npz"])
def test_a_damaged_file_is_named_or_only_its_values_differ(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    draw = random.Random(name)
    if name == "x.npy":
        save(path, LABEL)
    else:
        savez(path, name == "compressed.npz", x=LABEL)
    whole = path.read_bytes()
    errors = []
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged[: draw.randrange(len(whole))] if draw.random() < 0.2 else damaged)
        for given in (path, [path]):
            try:
                source = numpy(x=given) if name == "x.npy" else numpy(given)
                source.take(np.arange(source.num_rows))
            except DataError as error:
                errors.append(str(error))
    assert len(errors) > 50
    assert [text for text in errors if str(path) not in text] == []


def test_it_is_cheap_to_pickle(tmp_path: Path) -> None:
    source = numpy(savez(tmp_path / "a.npz", True, y=np.arange(100)), x=save_rows(tmp_path / "x", np.arange(100)))
    source.take(np.arange(100))
    assert len(pickle.dumps(source)) < 4000


def test_the_fingerprint_depends_on_the_files_and_not_on_their_directory(tmp_path: Path) -> None:
    def fingerprint(directory: str, rows: Any, label: Any) -> dict[str, Any]:
        here = tmp_path / directory
        return numpy(x=save_rows(here / "x", rows), label=save(here / "label.npy", label)).fingerprint()

    first = fingerprint("one", heatmaps(), LABEL)
    assert fingerprint("two", heatmaps(), LABEL) == first
    assert first | {"files": 6, "rows": 5, "columns": "x: float32 [2, 3], label: int64 []"} == first
    wider = fingerprint("three", heatmaps(), LABEL.astype("complex64").reshape(5, 1))
    assert {key for key in first if first[key] != wider[key]} == {"columns"}
    fewer = fingerprint("four", heatmaps(4), LABEL[1:])
    assert {key for key in first if first[key] != fewer[key]} == {"files", "rows", "bytes", "digest"}
