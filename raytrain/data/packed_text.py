"""Which rows do texts become that are cut in sequences of one length?

The tokens of all documents follow each other in the order of the files, with a separator after each document, and are cut
every `length` tokens; so no token is padding, and only the last few do not fill a row. Tokenized once, in the driver.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from pickle import PicklingError
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import fs

from raytrain.data.converted import ConvertedSource, Tables, converted
from raytrain.data.line_files import Jsonl, read_blocks
from raytrain.data.parquet_footers import File, FileKind, find_files, unreadable
from raytrain.data.source import missing_column
from raytrain.errors import DataError
from raytrain.units import format_count

TEXT = FileKind("text()", "text", (".txt", ".jsonl", ".jsonl.gz", ".parquet"))
TOKENS_AT_ONCE = 2**20
TOKEN_LIMIT = 2**31

Document = tuple[Callable[[], str], str]
"""Says where a document is, for errors; and its text."""
Tokenizer = Callable[[str], Sequence[int] | NDArray[Any]]


def utf8(text: str) -> NDArray[np.uint8]:
    """The bytes of a text."""
    return np.frombuffer(text.encode(), np.uint8)


def text(
    paths: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    length: int,
    tokenizer: Tokenizer = utf8,
    separator: int = 0,
    column: str = "text",
    filesystem: fs.FileSystem | None = None,
) -> ConvertedSource:
    """A source over texts, packed in rows of `length` tokens: column `tokens`, int32, shape [rows, length].

    The texts are tokenized once, and their tokens are kept in the storage of the runs. For training on the next token, use
    `tokens[:, :-1]` and `tokens[:, 1:]`.

    Args:
        paths: a path or URI, or a list of them: files, directories (all .txt, .jsonl, .jsonl.gz and .parquet files below
            them) or local globs. A document is a whole text file, or a row of a JSON Lines or Parquet file.
        length: tokens per row.
        tokenizer: returns the tokens of a text, such as `lambda text: gpt2(text)["input_ids"]`; by default its UTF-8 bytes,
            0 to 255. Texts are tokenized anew when its code or its settings change.
        separator: the token after each document.
        column: of the texts in JSON Lines and Parquet files.
        filesystem: filesystem of the paths, if they are neither local nor URIs.

    Raises:
        DataError: a path is missing, a file cannot be read, tokens are not numbers from 0, or they fill no row.
    """
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise DataError("text(length=...)", repr(length), "is a number of tokens, at least 1", "give one, such as 1024")
    if isinstance(separator, bool) or not isinstance(separator, int) or not 0 <= separator < TOKEN_LIMIT:
        raise DataError("text(separator=...)", repr(separator), "is a token, 0 to 2**31 - 1", "give the end of a text, or 0")
    if not callable(tokenizer):
        fix = 'give a function, such as lambda text: tokenizer(text)["input_ids"]'
        raise DataError("text(tokenizer=...)", type(tokenizer).__name__, "takes a text and returns its tokens", fix)
    filesystem, files = find_files(paths, filesystem, TEXT)

    def convert() -> Tables:
        rest, num_tokens = np.empty(0, np.int32), 0
        for tokens in _batches(_tokens(filesystem, files, column, tokenizer, separator)):
            num_tokens += len(tokens)
            line = np.concatenate([rest, tokens])
            whole = len(line) // length * length
            rest = line[whole:]
            if whole:
                yield pa.table({"tokens": pa.FixedSizeListArray.from_arrays(line[:whole], length)})
        if num_tokens < length:
            where = f"data, {len(files)} files such as {files[0].path}"
            raise DataError(where, f"{num_tokens} tokens", f"have enough for a row of {length}", "lower length=")
        left = f"the last {format_count(len(rest))} of {format_count(num_tokens)} tokens fill no row and are left out"
        return {"tokens": num_tokens, "notes": [left] if len(rest) else []}

    options = {"length": length, "separator": separator, "column": column, "tokenizer": _digest(tokenizer)}
    return converted(TEXT.title, files, filesystem, options, convert)


def _digest(tokenizer: Tokenizer) -> str:
    """A digest of a tokenizer's settings and of the file that defines it."""
    from ray import cloudpickle

    try:
        pickled = cloudpickle.dumps(tokenizer)
    except (TypeError, AttributeError, PicklingError) as error:
        rule, fix = "can be pickled, so that a change of it is noticed", "give a function that builds what it needs"
        raise DataError("text(tokenizer=...)", str(error), rule, fix) from error
    defined = sys.modules.get(getattr(tokenizer, "__module__", None) or type(tokenizer).__module__)
    source = getattr(defined, "__file__", None)
    code = Path(source).read_bytes() if source and Path(source).is_file() else b""
    return hashlib.blake2b(pickled + code, digest_size=16).hexdigest()


def _tokens(
    filesystem: fs.FileSystem, files: Sequence[File], column: str, tokenizer: Tokenizer, separator: int
) -> Iterator[NDArray[np.int32]]:
    """The tokens of each document, and the separator."""
    for where, document in _documents(filesystem, files, column):
        tokens = np.asarray(tokenizer(document))
        is_valid = tokens.ndim == 1 and (not len(tokens) or tokens.dtype.kind in "iu")
        if not is_valid or (len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < TOKEN_LIMIT):
            found = f"{tokens.dtype} {list(tokens.shape)}" if not is_valid else f"{tokens.min()} to {tokens.max()}"
            rule = "the tokenizer returns a list of tokens, whole numbers from 0 to 2**31 - 1"
            raise DataError(where(), found, rule, 'return the list itself, such as tokenizer(text)["input_ids"]')
        yield np.append(tokens, separator).astype(np.int32)


def _batches(parts: Iterator[NDArray[np.int32]]) -> Iterator[NDArray[np.int32]]:
    waiting: list[NDArray[np.int32]] = []
    num_waiting = 0
    for part in parts:
        waiting.append(part)
        num_waiting += len(part)
        if num_waiting >= TOKENS_AT_ONCE:
            yield np.concatenate(waiting)
            waiting, num_waiting = [], 0
    if waiting:
        yield np.concatenate(waiting)


def _documents(filesystem: fs.FileSystem, files: Sequence[File], column: str) -> Iterator[Document]:
    for file in files:
        if file.path.endswith((".jsonl", ".jsonl.gz")):
            form = Jsonl()
            for block in read_blocks(filesystem, [file], form):
                table = form.parse(block, None)
                yield from _texts(table, column, block.at)
        elif file.path.endswith(".parquet"):
            yield from _rows(filesystem, file, column)
        else:
            with filesystem.open_input_stream(file.path) as stream:
                yield partial(str, f"data, file {file.path}"), _decoded(file, stream.read())


def _rows(filesystem: fs.FileSystem, file: File, column: str) -> Iterator[Document]:
    try:
        with filesystem.open_input_file(file.path) as stream:
            stored = pq.ParquetFile(stream)
            if column not in stored.schema_arrow.names:
                raise missing_column(f"data, file {file.path}", column, stored.schema_arrow.names)
            start = 0
            for batch in stored.iter_batches(columns=[column]):
                yield from _texts(batch, column, partial(_row_of, file, start))
                start += len(batch)
    except (pa.ArrowInvalid, OSError) as error:
        raise unreadable(file, error) from error


def _row_of(file: File, start: int, row: int) -> str:
    return f"data, file {file.path}, row {start + row}"


def _in_column(at: Callable[[int], str], row: int, column: str) -> str:
    return f"{at(row)}, column {column!r}"


def _texts(table: Any, column: str, at: Callable[[int], str]) -> Iterator[Document]:
    names = table.schema.names
    if column not in names:
        raise missing_column(at(0), column, names)
    for row, value in enumerate(table.column(column)):
        document = value.as_py()
        if not isinstance(document, str):
            fix = "fill it, or name the column of texts with text(..., column=...)"
            raise DataError(_in_column(at, row, column), repr(document), "is a text", fix)
        yield partial(_in_column, at, row, column), document


def _decoded(file: File, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        where, found = f"data, file {file.path}, line {line}", f"byte {data[error.start]:#04x}"
        raise DataError(where, found, "is UTF-8", "convert it, for example with iconv") from None
