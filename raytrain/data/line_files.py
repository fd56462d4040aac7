"""Which rows do CSV and JSON Lines files have, and which type does each column have in all of them?

The files are read twice, block by block: once to find the type of each column over all rows, once to convert them to it. So
a column has one type, and no value is lost, wherever in the files the first fraction is. Arrow parses. Runs in the driver.
"""

from __future__ import annotations

import csv as python_csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import csv as arrow_csv
from pyarrow import fs
from pyarrow import json as arrow_json

from raytrain.data.arrow import PAD_OR_CUT, Unfit, combined, decode, dtype_of, whole
from raytrain.data.converted import ConvertedSource, Facts, Tables, converted
from raytrain.data.parquet import Pad
from raytrain.data.parquet_footers import File, FileKind, find_files
from raytrain.data.source import NO_NULLS, left_out_column, missing_column
from raytrain.errors import DataError

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]

BLOCK_BYTES = 16 * 2**20
QUOTED_LINES = 1000  # over which a value in quotes may go on
EXACT = 2**53  # float64 has all whole numbers up to this one
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Block:
    """Whole lines of a file.

    Args:
        path: of the file.
        text: the lines.
        line: number of the first one, from 1.
    """

    path: str
    text: bytes
    line: int

    def at(self, row: int) -> str:
        """Where a row is, for errors."""
        full = [number for number, line in enumerate(self.text.splitlines()) if line.strip()]
        return f"data, file {self.path}, line {self.line + full[min(row, len(full) - 1)]}"


class Format(Protocol):
    """How lines become columns."""

    kind: FileKind

    @property
    def quote(self) -> bytes:
        """Inside of two of these a line may end without ending the row; b"" if there is no such thing."""

    def begin(self, block: Block) -> Block:
        """The first block of a file, without what stands before the rows. Raises DataError."""

    def parse(self, block: Block, schema: pa.Schema | None) -> pa.Table:
        """The rows of a block. Raises DataError.

        Args:
            schema: the columns to read and their types; None for all columns and types that fit these rows.
        """


class Csv:
    """Values between delimiters, with the names of the columns in the first line of each file."""

    kind = FileKind("csv()", "CSV", (".csv", ".csv.gz"))
    quote = b'"'

    def __init__(self, delimiter: str) -> None:
        self._delimiter, self._names, self._first = delimiter, list[str](), ""

    def begin(self, block: Block) -> Block:
        head, _, rest = block.text.partition(b"\n")
        line = head.decode(errors="replace").rstrip("\r")
        names = next(python_csv.reader([line], delimiter=self._delimiter), [])
        where, shown = f"data, file {block.path}, line 1", line if len(line) <= 80 else f"{line[:77]}..."
        numbers = [name for name in names if re.fullmatch(r"\s*[-+]?[\d.]+([eE][-+]?\d+)?\s*", name)]
        if numbers or not all(names) or len(set(names)) < len(names):
            rule = "the first line of a CSV file names its columns, each with a name of its own"
            raise DataError(where, shown, rule, "write such a line; raytrain.csv(..., delimiter=...) takes other delimiters")
        if self._names and names != self._names:
            rule = f"all files have the columns of {self._first}: {', '.join(self._names)}"
            raise DataError(where, shown, rule, "write them alike, or give the files of one kind only")
        self._names, self._first = names, self._first or block.path
        return Block(block.path, rest, 2)

    def parse(self, block: Block, schema: pa.Schema | None) -> pa.Table:
        options = (
            arrow_csv.ConvertOptions(check_utf8=False)
            if schema is None
            else arrow_csv.ConvertOptions(column_types=schema, include_columns=schema.names, check_utf8=False)
        )
        try:
            return arrow_csv.read_csv(
                io.BytesIO(block.text),
                arrow_csv.ReadOptions(use_threads=False, block_size=len(block.text) + 1, column_names=self._names),
                arrow_csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
                options,
            )
        except pa.ArrowInvalid as error:
            row = re.search(r"Row #(\d+)", str(error))
            found = str(error).partition("\n")[0].rpartition("Row #")[2].partition(": ")[2] or str(error)
            rule = f"each line has a value for each of the columns {', '.join(self._names)}"
            raise DataError(block.at(int(row[1]) - 1 if row else 0), found, rule, "correct the line") from error


class Jsonl:
    """A JSON object in each line; its keys are the columns."""

    kind = FileKind("jsonl()", "JSON Lines", (".jsonl", ".jsonl.gz", ".ndjson"))
    quote = b""  # JSON writes the end of a line in a text as \n

    def begin(self, block: Block) -> Block:
        return block

    def parse(self, block: Block, schema: pa.Schema | None) -> pa.Table:
        options = (
            arrow_json.ParseOptions()
            if schema is None
            else arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        )
        reading = arrow_json.ReadOptions(use_threads=False, block_size=len(block.text) + 1)
        try:
            return arrow_json.read_json(io.BytesIO(block.text), reading, options)
        except pa.ArrowInvalid as error:
            text = str(error).partition("\n")[0].removeprefix("JSON parse error: ")
            row = re.search(r" in row (\d+)", text)
            found, rule = text.partition(" in row ")[0], "each line is a JSON object, and a key has one type in all of them"
            raise DataError(block.at(int(row[1]) if row else 0), found, rule, "correct the line") from error


@dataclass
class Found:
    """What the rows so far tell about a column.

    Args:
        kind: its type.
        place: where the first row that has it is.
        shape: the row shape; None as long as there are nulls only.
        refusal: why its values cannot be a column of tensors.
        is_whole: whether all of its floats are whole numbers.
        largest_integer, largest: magnitudes, of integers and of all values.
        text: the first value that is not a number, where others are.
    """

    kind: pa.DataType
    place: str
    shape: tuple[int, ...] | None = None
    refusal: DataError | None = None
    is_whole: bool = True
    largest_integer: float = 0
    largest: float = 0
    text: str = ""

    @property
    def is_numeric(self) -> bool:
        return dtype_of(self.kind) is not None

    def look(self, name: str, column: pa.ChunkedArray, block: Block, is_padded: bool) -> None:
        """Takes in the rows of another block.

        Raises:
            DataError: they have another type.
        """
        self._merge(name, column, block)
        if dtype_of(column.type) is None and not pa.types.is_null(column.type):
            return
        try:
            values = decode(combined(column).drop_null().flatten() if is_padded else whole(column))
        except Unfit as unfit:
            self.refuse(f"{block.at(unfit.row)}, column {name!r}", unfit.found, *unfit.remedy)
            return
        self.shape = values.shape[1:] if self.shape is None else self.shape
        if not is_padded and values.shape[1:] != self.shape:
            found, rule = f"rows of shape {list(values.shape[1:])}", f"all rows are like the first one, {list(self.shape)}"
            self.refuse(f"{block.at(0)}, column {name!r}", found, rule, PAD_OR_CUT)
        largest = max(values.max().item(), -values.min().item()) if values.size else 0
        self.largest = max(self.largest, largest)
        if values.dtype.kind == "f":
            self.is_whole = self.is_whole and not (values % 1).any()
        else:
            self.largest_integer = max(self.largest_integer, largest)

    def refuse(self, where: str, found: str, rule: str, fix: str) -> None:
        self.refusal = self.refusal or DataError(where, found, rule, fix)

    def check(self, name: str) -> None:
        """Raises DataError if the column cannot be read without a change of its values."""
        if self.refusal:
            raise self.refusal
        dtype = dtype_of(self.kind)
        is_rounded = (self.is_whole and self.largest >= EXACT) or self.largest_integer > EXACT
        if dtype is not None and dtype.kind == "f" and is_rounded:
            found, rule = f"whole numbers up to {self.largest:.6g}", "keeps each value, but float64 rounds them"
            raise DataError(f"{self.place}, column {name!r}", found, rule, "write it as int64, or as text if it is not used")

    def _merge(self, name: str, column: pa.ChunkedArray, block: Block) -> None:
        """The type of all rows so far. A column that begins as something else than numbers stays that."""
        one, other = pa.schema([("x", self.kind)]), pa.schema([("x", column.type)])
        try:
            self.kind = pa.unify_schemas([one, other], promote_options="permissive").field("x").type
        except (pa.ArrowTypeError, pa.ArrowInvalid):
            if self.is_numeric:
                row, text = _first_text(column)
                fix = "correct it, or leave the column out of columns="
                raise DataError(
                    f"{block.at(row)}, column {name!r}", text, f"is {self.kind}, as in the first rows", fix
                ) from None
        if not self.text and pa.types.is_string(self.kind) and _is_number(column[0]):
            row, text = _first_text(column)
            self.text = f", such as {text} in line {block.at(row).rpartition(' ')[2]}"


def csv(
    paths: Paths, *, columns: Sequence[str] | None = None, delimiter: str = ",", filesystem: fs.FileSystem | None = None
) -> ConvertedSource:
    """A source over CSV files, whose first lines name the columns.

    They are converted to Parquet once, in the storage of the runs. Write large data as Parquet in the first place.

    Args:
        paths: a path or URI, or a list of them: files (.csv, .csv.gz), directories or local globs.
        columns: names of the columns to read; by default all with numbers or booleans, and texts are left out.
        delimiter: the character between values.
        filesystem: filesystem of the paths, if they are neither local nor URIs.

    Raises:
        DataError: a path is missing, a line does not fit, there are no rows, or a column has empty values, texts between
            numbers, or whole numbers that float64 rounds.
    """
    return _source(paths, columns, filesystem, Csv(delimiter), {"delimiter": delimiter})


def jsonl(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    pad: Pad | None = None,
    filesystem: fs.FileSystem | None = None,
) -> ConvertedSource:
    """A source over JSON Lines files: an object in each line.

    They are converted to Parquet once, in the storage of the runs. Write large data as Parquet in the first place.

    Args:
        paths: a path or URI, or a list of them: files (.jsonl, .jsonl.gz, .ndjson), directories or local globs.
        columns: keys to read; by default all with numbers, booleans or lists of them.
        pad: columns of lists of different lengths, as in `parquet`.
        filesystem: filesystem of the paths, if they are neither local nor URIs.

    Raises:
        DataError: a path is missing, a line is no JSON object, there are no rows, a column has missing values or values of
            different types, or whole numbers that float64 rounds, or `pad` does not fit.
    """
    return _source(paths, columns, filesystem, Jsonl(), {"padded": sorted(pad or ())}, pad)


def _source(
    paths: Paths,
    columns: Sequence[str] | None,
    filesystem: fs.FileSystem | None,
    form: Format,
    options: dict[str, Any],
    pad: Pad | None = None,
) -> ConvertedSource:
    filesystem, files = find_files(paths, filesystem, form.kind)
    wanted = None if columns is None else list(columns)

    def convert() -> Tables:
        found = _scan(filesystem, files, form, pad or {})
        chosen, left_out = _choose(form.kind.function, found, wanted)
        return _tables(filesystem, files, form, pa.schema([(name, found[name].kind) for name in chosen]), left_out)

    options |= {"columns": wanted}
    return converted(form.kind.title, files, filesystem, options, convert, pad)


def read_blocks(filesystem: fs.FileSystem, files: Sequence[File], form: Format) -> Iterator[Block]:
    """The lines of the files that have rows; files are decompressed where their names tell so."""
    for file in files:
        is_first = True
        for block in _blocks(filesystem, file, form.quote):
            begun = form.begin(Block(block.path, block.text.removeprefix(BYTE_ORDER_MARK), 1)) if is_first else block
            is_first = False
            if begun.text.strip():
                yield begun


def _blocks(filesystem: fs.FileSystem, file: File, quote: bytes) -> Iterator[Block]:
    line, rest = 1, b""
    try:
        with filesystem.open_input_stream(file.path) as stream:
            while data := stream.read(BLOCK_BYTES):
                rest += data
                if end := _end_of_rows(rest, quote):
                    yield Block(file.path, rest[:end], line)
                    line, rest = line + rest.count(b"\n", 0, end), rest[end:]
    except OSError as error:
        raise DataError(f"data, file {file.path}", str(error), "can be read", "write the file again") from error
    if rest:
        yield Block(file.path, rest, line)


def _end_of_rows(text: bytes, quote: bytes) -> int:
    """Where the last whole row ends; not at a line's end within quotes, unless nearly all lines are."""
    last = end = text.rfind(b"\n") + 1
    is_inside = bool(quote) and text.count(quote, 0, end) % 2 == 1
    for _ in range(QUOTED_LINES):
        if not is_inside or not end:
            break
        start = text.rfind(b"\n", 0, end - 1) + 1
        is_inside, end = is_inside != (text.count(quote, start, end) % 2 == 1), start
    return end if end and not is_inside else last


def _scan(filesystem: fs.FileSystem, files: Sequence[File], form: Format, pad: Pad) -> dict[str, Found]:
    """What all rows tell about each column."""
    found: dict[str, Found] = {}
    for number, block in enumerate(read_blocks(filesystem, files, form)):
        table = form.parse(block, None)
        for name in {**found, **dict.fromkeys(table.column_names)}:
            if name not in found:
                found[name] = Found(table.schema.field(name).type, block.at(0))
            if name in table.column_names:
                found[name].look(name, table.column(name), block, name in pad)
            if number and (name not in table.column_names or found[name].place == block.at(0)):
                found[name].refuse(f"{block.at(0)}, column {name!r}", "only in some lines", *NO_NULLS)
    if not found:
        where = f"data, {len(files)} {form.kind.title} files such as {files[0].path}"
        raise DataError(where, "0 rows", "the dataset must not be empty", form.kind.fix)
    return found


def _choose(function: str, found: dict[str, Found], wanted: Sequence[str] | None) -> tuple[list[str], Facts]:
    """The columns to read, and for each other one the reason. Raises DataError."""
    where = f"{function[:-2]}(columns=...)"
    left_out = {name: f"type {column.kind}{column.text}" for name, column in found.items() if not column.is_numeric}
    for name in wanted or ():
        if name not in found:
            raise missing_column(where, name, found)
        if name in left_out:
            raise left_out_column(where, name, left_out[name])
    chosen = [name for name in found if name not in left_out] if wanted is None else list(wanted)
    if not chosen:
        reasons = ", ".join(f"{name} ({reason})" for name, reason in left_out.items())
        raise DataError(function, reasons, "at least one column can become a tensor", "write a column as numbers")
    for name in chosen:
        found[name].check(name)
    return chosen, {"left_out": left_out if wanted is None else {}}


def _tables(filesystem: fs.FileSystem, files: Sequence[File], form: Format, schema: pa.Schema, left_out: Facts) -> Tables:
    for block in read_blocks(filesystem, files, form):
        yield form.parse(block, schema).select(schema.names).cast(schema)
    return left_out


def _first_text(column: pa.ChunkedArray) -> tuple[int, str]:
    """The first value that is not a number, and its row; the first row if all are."""
    row = next((row for row, value in enumerate(column) if not _is_number(value)), 0)
    text = str(column[row].as_py())
    return row, repr(text if len(text) <= 40 else f"{text[:37]}...")


def _is_number(value: pa.Scalar) -> bool:
    try:
        float(str(value.as_py()))
    except ValueError:
        return False
    return True
