"""CSV, JSON Lines and text files: which rows they have, when they are converted, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raytrain.config import RunConfig
from raytrain.data import line_files
from raytrain.data.converted import ConvertedSource, converting_to
from raytrain.data.line_files import csv, jsonl
from raytrain.data.packed_text import text
from raytrain.errors import DataError, StorageError
from raytrain.launch.schedule import build_schedule
from raytrain.task import Task
from tests.golden import check


@pytest.fixture
def said(tmp_path: Path) -> Iterator[list[str]]:
    """What was said while data are converted below `tmp_path/storage`."""
    texts: list[str] = []
    with converting_to(str(tmp_path / "storage"), texts.append):
        yield texts


def rows_of(source: ConvertedSource) -> dict[str, Any]:
    return {name: values.tolist() for name, values in source.take(np.arange(source.num_rows)).items()}


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


NUMBERS = st.one_of(st.integers(-(2**50), 2**50), st.floats(-1e6, 1e6))


@pytest.mark.usefixtures("said")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(NUMBERS, st.booleans(), st.text("a\n\",é'", max_size=4)), min_size=1, max_size=30))
def test_r13_values_are_those_of_the_lines_wherever_blocks_end(rows: list[tuple[Any, ...]], tmp_path: Path) -> None:
    frame = pd.DataFrame(rows, columns=["x", "flag", "name"])
    for file in tmp_path.glob("rows.*"):
        file.unlink()
    frame.to_csv(tmp_path / "rows.csv", index=False)
    write(tmp_path / "rows.jsonl", "".join(json.dumps(dict(zip(frame, row, strict=True))) + "\n" for row in rows))
    before = line_files.BLOCK_BYTES
    line_files.BLOCK_BYTES = 40
    try:
        for source in (csv(tmp_path / "rows.csv"), jsonl(tmp_path / "rows.jsonl")):
            assert rows_of(source) == {"x": [x for x, _, _ in rows], "flag": [flag for _, flag, _ in rows]}
            is_whole = all(isinstance(x, int) for x, _, _ in rows)
            assert source.take(np.array([0]))["x"].dtype == ("int64" if is_whole else "float64")
    finally:
        line_files.BLOCK_BYTES = before


def test_files_are_converted_once_until_one_changes(said: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", "id,x\n1,0.5\n2,1.5\n")
    first, again = csv(path), csv(tmp_path)
    assert rows_of(first) == rows_of(again) == {"id": [1, 2], "x": [0.5, 1.5]}
    assert [line.split()[0] for line in said] == ["converting", "converted"]
    os.utime(path, (1, 1))
    touched = csv(path)
    assert touched.fingerprint() == first.fingerprint()
    write(path, "id,x\n1,0.5\n2,2.5\n")
    assert csv(path).fingerprint()["digest"] != first.fingerprint()["digest"]
    assert rows_of(csv(path, columns=["x"])) == {"x": [0.5, 2.5]}
    assert rows_of(first)["x"] == [0.5, 1.5]  # runs that use the earlier file go on
    assert len(said) == 8


def test_a_conversion_that_ended_early_leaves_nothing_and_is_done_again(said: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", "x\n1\n")
    csv(path)
    manifest = next((tmp_path / "storage").rglob("manifest.json"))
    manifest.write_text("{")
    assert rows_of(csv(path)) == {"x": [1]}
    path = write(tmp_path / "texts.txt", "a")

    def stops(document: str) -> list[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        text(path, length=1, tokenizer=stops)
    assert len(list((tmp_path / "storage").rglob("*.parquet"))) == 2
    assert said[-1].startswith("converting")


@pytest.mark.usefixtures("said")
def test_files_may_be_compressed_have_other_delimiters_and_a_byte_order_mark(tmp_path: Path) -> None:
    write(tmp_path / "1.csv.gz", gzip.compress(b"\xef\xbb\xbfa;b\r\n1;x\r\n2;y\r\n\r\n"))
    write(tmp_path / "2.csv", "a;b\n3;z")
    source = csv(tmp_path, delimiter=";")
    assert rows_of(source) == {"a": [1, 2, 3]}
    assert source.left_out == {"b": "type string"}


@pytest.mark.usefixtures("said")
def test_lists_of_json_keep_their_shape_or_are_padded(tmp_path: Path) -> None:
    lines = [{"pair": [[1, 2], [3, 4]], "tokens": [7] * n, "more": {"a": 1}} for n in range(3)]
    path = write(tmp_path / "rows.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    source = jsonl(path, pad={"tokens": -1})
    assert source.take(np.array([2]))["pair"].shape == (1, 2, 2)
    assert rows_of(source)["tokens"] == [[-1, -1], [7, -1], [7, 7]]
    assert rows_of(source)["tokens_length"] == [0, 1, 2]
    assert list(source.left_out) == ["more"]


def test_texts_are_packed_in_rows_of_one_length(said: list[str], tmp_path: Path) -> None:
    write(tmp_path / "1.txt", "hello")
    write(tmp_path / "2.jsonl", '{"text": "é"}\n{"text": ""}\n{"text": "ab"}\n')
    pq.write_table(pa.table({"text": ["cd", "e"]}), tmp_path / "3.parquet")
    line = b"hello\0\xc3\xa9\0\0ab\0cd\0e\0"
    source = text(tmp_path, length=4)
    assert source.take(np.array([0]))["tokens"].dtype == np.int32
    assert bytes(np.concatenate(rows_of(source)["tokens"]).astype("u1")) == line[:16]
    assert said[-1].endswith("the last 2 of 18 tokens fill no row and are left out")
    assert source.fingerprint()["tokens"] == 18
    assert rows_of(text(tmp_path, length=6, separator=9, tokenizer=lambda text: [len(text)])) == {
        "tokens": [[5, 9, 1, 9, 0, 9], [2, 9, 2, 9, 1, 9]]
    }


def test_texts_are_tokenized_anew_by_another_tokenizer(said: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "1.txt", "hello")
    sources = [text(path, length=1, tokenizer=lambda text, by=by: [len(text) + by]) for by in (0, 1, 1)]
    assert [rows_of(source)["tokens"][0][0] for source in sources] == [5, 6, 6]
    assert len(said) == 4


class FromCsv(Task):
    """A task whose data are a CSV file."""

    path: str = ""

    def data(self) -> Any:
        return {"train": csv(self.path)}

    def model(self) -> Any: ...

    def optimizer(self, model: Any) -> Any: ...

    def loss(self, model: Any, batch: Any) -> Any: ...


def test_a_run_converts_data_in_its_storage_and_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", "x\n" + "1\n" * 70)
    said: list[str] = []
    config = RunConfig(storage=str(tmp_path / "runs"))
    assert build_schedule(FromCsv(path=str(path)), config, said.append).train.num_rows == 70
    assert len(said) == 2
    assert list((tmp_path / "runs" / ".data").iterdir())


def test_a_storage_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path, storage = write(tmp_path / "rows.csv", "x\n1\n"), write(tmp_path / "file", "")
    with converting_to(str(storage), lambda text: None), pytest.raises(StorageError, match=str(storage)):
        csv(path)


def csv_of(content: str | bytes, **options: Any) -> Callable[[], object]:
    return lambda: csv(write(Path("rows.csv"), content), **options)


def jsonl_of(*lines: str, **options: Any) -> Callable[[], object]:
    return lambda: jsonl(write(Path("rows.jsonl"), "".join(f"{line}\n" for line in lines)), **options)


def text_of(content: str | bytes, **options: Any) -> Callable[[], object]:
    return lambda: text(write(Path("text.txt"), content), **{"length": 2} | options)


def two_headers() -> object:
    write(Path("1.csv"), "a,b\n1,2\n")
    write(Path("2.csv"), "b,a\n1,2\n")
    return csv(Path())


REFUSED: dict[str, Callable[[], object]] = {
    "csv_missing": lambda: csv("nowhere.csv"),
    "csv_no_header": csv_of("1,2\n3,4\n"),
    "csv_same_names": csv_of("a,a\n3,4\n"),
    "csv_other_header": two_headers,
    "csv_no_rows": csv_of("a,b\n"),
    "csv_too_few_values": csv_of("a,b\n1,2\n3\n"),
    "csv_empty_value": csv_of("a,b\n1,2\n\n3,\n"),
    "csv_text_later": csv_of("a,b\n" + "1,2\n" * 20 + "1,x\n"),
    "csv_text_asked_for": csv_of("a,b\n1,2\n1,x\n", columns=["b"]),
    "csv_no_numbers": csv_of("a\nx\n"),
    "csv_misspelt_column": csv_of("alpha,b\n1,2\n", columns=["alpa"]),
    "csv_large_integers": csv_of("a\n18446744073709551615\n1\n"),
    "csv_rounded_integers": csv_of("a\n9007199254740993\n" + "1\n" * 20 + "0.5\n"),
    "jsonl_not_json": jsonl_of('{"a": 1}', "", '{"a": 2'),
    "jsonl_array": jsonl_of('[{"a": 1}]'),
    "jsonl_types": jsonl_of('{"a": 1}', '{"a": "x"}'),
    "jsonl_missing_key": jsonl_of('{"a": 1, "b": 1}', '{"a": 2}', columns=["b"]),
    "jsonl_late_key": jsonl_of(*['{"a": 1}'] * 20, '{"a": 2, "b": 3}'),
    "jsonl_ragged": jsonl_of('{"a": [1, 2]}', '{"a": [3]}'),
    "jsonl_ragged_later": jsonl_of(*['{"a": [1, 2]}'] * 10, *['{"a": [3]}'] * 10),
    "text_length": text_of("abc", length=0),
    "text_separator": text_of("abc", separator=-1),
    "text_tokenizer": text_of("abc", tokenizer="gpt2"),
    "text_strings": text_of("abc", tokenizer=lambda text: ["a", "b"]),
    "text_negative": text_of("abc", tokenizer=lambda text: [-1]),
    "text_too_short": text_of("abc", length=10),
    "text_not_utf8": text_of(b"abc\n\xff\xfe\n"),
    "text_no_column": lambda: text(write(Path("rows.jsonl"), '{"txt": "a"}\n'), length=2),
    "text_null": lambda: text(write(Path("rows.jsonl"), '{"text": "a"}\n{"text": null}\n'), length=2),
    "text_no_files": lambda: text(".", length=2),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_with_its_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(line_files, "BLOCK_BYTES", 50)
    with converting_to("runs", lambda text: None), pytest.raises(DataError) as refused:
        REFUSED[case]()
    check(f"errors/{case}.txt", f"{refused.value}\n".replace(str(tmp_path), "DIR"))
    assert not list(Path().rglob("*.parquet"))
