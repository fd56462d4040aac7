"""Which files do the paths name, and what do the footers of Parquet files tell: row groups, columns, dtypes, nulls?

Finds files on any filesystem that pyarrow knows, reads footers with a few threads, and chooses for all files together
which columns become tensors, so that a column has one dtype in every batch of a run. Reads no values. Runs in the
driver, where the source is built.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from glob import glob, has_magic
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from raytrain.data.arrow import PAD_OR_CUT, depth_of, dtype_of
from raytrain.data.source import NO_NULLS, keeps_values, missing_column
from raytrain.errors import DataError

FOOTER_THREADS = 8

_KEY = re.compile(r"([^=/]+)=([^=/]*)")


@dataclass(frozen=True)
class File:
    """A file: its path on the filesystem, its path below the root that was asked for, its size, and when it was written."""

    path: str
    name: str
    size_bytes: int
    mtime_ns: int = 0

    @property
    def keys(self) -> dict[str, str]:
        """Partition keys in its path, such as year=2024."""
        matches = (_KEY.fullmatch(part) for part in posixpath.dirname(self.name).split("/"))
        return {match[1]: match[2] for match in matches if match}


@dataclass(frozen=True)
class Footer:
    """The footer of a file.

    Args:
        file: the file.
        schema: its columns.
        group_rows: number of rows of each row group.
        num_values: for each top-level column and row group, number of innermost values, with nulls and empty lists.
        num_nulls: for each top-level column, number of innermost nulls over all row groups; None where unknown.
    """

    file: File
    schema: pa.Schema
    group_rows: tuple[int, ...]
    num_values: dict[str, list[int]]
    num_nulls: dict[str, int | None]

    @property
    def num_rows(self) -> int:
        return sum(self.group_rows)


@dataclass(frozen=True)
class Column:
    """A column that becomes tensors.

    Args:
        name: its name in the files.
        dtype: its dtype in every batch.
        depth: number of lists around a number; the shape of rows with lists is that of the first row.
        is_key: whether it is a partition key in the path, as in year=2024.
        padding: the value and the length of each row to which lists are padded; None where they are not.
        is_length: whether it tells the lengths of a padded column's lists, so that it is not in the files.
    """

    name: str
    dtype: np.dtype[Any]
    depth: int = 0
    is_key: bool = False
    padding: tuple[float, int] | None = None
    is_length: bool = False

    @property
    def in_files(self) -> bool:
        return not self.is_key and not self.is_length


@dataclass(frozen=True)
class FileKind:
    """Which files are looked for: the function that was called, what they are called, and how their names end."""

    function: str
    title: str
    endings: tuple[str, ...]

    @property
    def fix(self) -> str:
        return f"correct the path given to {self.function}"


PARQUET = FileKind("parquet()", "Parquet", (".parquet",))


def find_files(paths: Any, filesystem: fs.FileSystem | None, kind: FileKind = PARQUET) -> tuple[fs.FileSystem, list[File]]:
    """The files that paths name: in the order of the paths, sorted below each directory and glob.

    Raises:
        DataError: a path does not exist, or has no such files.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths) if isinstance(paths, Iterable) else [paths]
    for path in given:
        if not isinstance(path, (str, os.PathLike)):
            rule, fix = (
                "is a path or URI, or a list of them",
                "give text or a Path; `data` returns data in memory as they are",
            )
            raise DataError(kind.function, type(path).__name__, rule, fix)
    if not given:
        raise DataError(
            kind.function, "no paths", "at least one path is required", "give a file, a directory or a list of them"
        )
    texts = [str(os.fspath(path)) for path in given]
    if filesystem is None:
        filesystem = fs.FileSystem.from_uri(texts[0])[0] if "://" in texts[0] else fs.LocalFileSystem()
    files = [file for text in texts for file in _below(_plain_path(text, filesystem), filesystem, kind)]
    if len(texts) > 1:
        root = posixpath.commonpath([posixpath.dirname(file.path) for file in files])
        files = [replace(file, name=posixpath.relpath(file.path, root)) for file in files]
    return filesystem, files


def read_footers(filesystem: fs.FileSystem, files: Sequence[File]) -> list[Footer]:
    """Reads the footer of each file.

    Raises:
        DataError: a file is not a whole Parquet file.
    """
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        return list(pool.map(lambda file: _read_footer(filesystem, file), files))


def unreadable(file: File, error: Exception) -> DataError:
    """The error for a file that pyarrow cannot read."""
    found = "0 bytes" if not file.size_bytes else str(error).splitlines()[0]
    fix = "write the file again, or leave it out"
    return DataError(f"data, file {file.path}", found, "is a complete, readable Parquet file", fix)


def choose_columns(footers: Sequence[Footer], wanted: Sequence[str] | None) -> tuple[list[Column], dict[str, str]]:
    """The columns to read, and the reason for each column that is left out.

    Args:
        footers: those of files that have rows.
        wanted: names to read; None for all that can become tensors.

    Raises:
        DataError: a wanted column is missing or cannot become a tensor, or one is in some files only.
    """
    names = list(dict.fromkeys(name for footer in footers for name in [*footer.schema.names, *_keys(footer)]))
    for name in wanted or ():
        if name not in names:
            raise missing_column("parquet(columns=...)", name, names)
    chosen, left_out = [], {}
    for name in names if wanted is None else wanted:
        reason, where = _obstacle(footers, name)
        if not reason:
            _check_everywhere(footers, name)
            _check_depths(footers, name)
            chosen.append(_column(footers, name))
        elif wanted is None:
            left_out[name] = reason
        else:
            fix = "leave the column out of columns=, or write it as numbers"
            raise DataError(f"data, column {name!r} of {where}", reason, "numbers and booleans become tensors", fix)
    if not chosen:
        found = ", ".join(f"{name} ({reason})" for name, reason in left_out.items()) or "no columns"
        raise DataError("data", found, "at least one column can become a tensor", "write a column as numbers")
    return chosen, left_out


def key_value(footer: Footer, name: str) -> int:
    """The value of a partition key of a file."""
    return int(footer.file.keys[name])


def check_nulls(footers: Sequence[Footer], columns: Sequence[Column]) -> None:
    """Raises DataError for a column with nulls. Lists are checked when read: footers count empty lists as nulls."""
    for footer in footers:
        for column in columns:
            count = 0 if column.depth or not column.in_files else footer.num_nulls.get(column.name)
            if count:
                where = f"data, column {column.name!r} of {footer.file.path}"
                raise DataError(where, f"{count} nulls", *NO_NULLS)


def check_lengths(footers: Sequence[Footer], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises DataError where the number of values shows that lists differ in length from the first row's."""
    for footer in footers:
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            for group, rows in enumerate(footer.group_rows if shape and size else ()):
                if footer.num_values[name][group] != rows * size:
                    where = f"data, column {name!r} of {footer.file.path}, row group {group}"
                    found = f"{footer.num_values[name][group]} values in {rows} rows"
                    rule = f"all rows have the shape of the first one, {list(shape)}"
                    raise DataError(where, found, rule, PAD_OR_CUT)


def _plain_path(text: str, filesystem: fs.FileSystem) -> str:
    """A path or URI as a path on the filesystem; absolute if local, since workers run in other directories."""
    if "://" in text:
        return str(fs.FileSystem.from_uri(text)[1])
    return os.path.abspath(os.path.expanduser(text)) if isinstance(filesystem, fs.LocalFileSystem) else text


def _below(path: str, filesystem: fs.FileSystem, kind: FileKind) -> list[File]:
    if has_magic(path) and isinstance(filesystem, fs.LocalFileSystem) and not os.path.exists(path):
        fixed = path[: re.search(r"[*?\[]", path).start()]  # type: ignore[union-attr]
        found = sorted(name for name in glob(path, recursive=True) if os.path.isfile(name))
        infos, root = filesystem.get_file_info(found), posixpath.dirname(fixed)
    else:
        info = filesystem.get_file_info(path)
        if info.type == fs.FileType.NotFound:
            raise DataError("data", path, "the path exists", kind.fix)
        if info.type == fs.FileType.File:
            infos, root = [info], posixpath.dirname(info.path)
        else:
            infos, root = _walk(path, filesystem, kind.endings), path.rstrip("/")
    files = [
        File(info.path, posixpath.relpath(info.path, root or "."), info.size or 0, info.mtime_ns or 0) for info in infos
    ]
    if not files:
        endings = ", ".join(f"*{ending}" for ending in kind.endings)
        raise DataError("data", path, f"has {kind.title} files ({endings})", kind.fix)
    return files


def _walk(directory: str, filesystem: fs.FileSystem, endings: tuple[str, ...]) -> list[Any]:
    """Files with such names below a directory, sorted by path; without hidden ones, whose names start with "." or "_"."""

    def is_hidden(path: str) -> bool:
        return any(part.startswith((".", "_")) for part in posixpath.relpath(path, directory).split("/"))

    infos = filesystem.get_file_info(fs.FileSelector(directory, recursive=True))
    found = (info for info in infos if info.is_file and info.path.endswith(endings) and not is_hidden(info.path))
    return sorted(found, key=lambda info: info.path)


def _read_footer(filesystem: fs.FileSystem, file: File) -> Footer:
    try:
        with filesystem.open_input_file(file.path) as stream:
            metadata = pq.read_metadata(stream)
            schema = metadata.schema.to_arrow_schema()
    except (pa.ArrowInvalid, OSError) as error:
        raise unreadable(file, error) from error
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    values: dict[str, list[int]] = {}
    nulls: dict[str, int | None] = {}
    for leaf in range(metadata.num_columns):
        chunks = [group.column(leaf) for group in groups]
        name = _top_level(metadata.schema.column(leaf).path, schema.names)
        values[name] = [chunk.num_values for chunk in chunks]
        counts = [c.statistics.null_count if c.statistics and c.statistics.has_null_count else None for c in chunks]
        nulls[name] = None if None in counts else sum(count for count in counts if count is not None)
    return Footer(file, schema, tuple(group.num_rows for group in groups), values, nulls)


def _top_level(path: str, names: Sequence[str]) -> str:
    """The column to which a leaf such as x.list.element belongs; column names may contain dots."""
    while path not in names and "." in path:
        path = path.rpartition(".")[0]
    return path


def _keys(footer: Footer) -> list[str]:
    return [name for name in footer.file.keys if name not in footer.schema.names]


def _field(footer: Footer, name: str) -> pa.DataType | None:
    return footer.schema.field(name).type if name in footer.schema.names else None


def _obstacle(footers: Sequence[Footer], name: str) -> tuple[str, str]:
    """Why a column cannot become tensors, and the file that shows it; empty texts where it can."""
    for footer in footers:
        kind = _field(footer, name)
        if kind is not None and dtype_of(kind) is None:
            return f"type {kind}", footer.file.path
        if kind is None and not _is_integer(footer.file.keys.get(name, "0")):
            return f"partition key {name}={footer.file.keys[name]}, not a whole number", footer.file.path
    return "", ""


def _check_everywhere(footers: Sequence[Footer], name: str) -> None:
    """Raises DataError for a column that some files lack, or that is a partition key of some only."""
    places = [
        "a column" if name in footer.schema.names else "a partition key" if name in footer.file.keys else ""
        for footer in footers
    ]
    if len(set(places)) > 1:
        first = places.index(next(filter(None, places)))
        other = next(i for i, place in enumerate(places) if place != places[first])
        found = f"{places[other]} in {footers[other].file.path}" if places[other] else f"not in {footers[other].file.path}"
        rule = f"is {places[first]} in all files, as in {footers[first].file.path}"
        fix = "leave it out by naming the wanted ones in parquet(columns=...), or write it to all files"
        raise DataError(f"data, column {name!r}", found, rule, fix)


def _check_depths(footers: Sequence[Footer], name: str) -> None:
    """Raises DataError for a column of lists in one file, and of numbers, or lists of lists, in another."""
    kinds = [kind for footer in footers if (kind := _field(footer, name)) is not None]
    for footer, kind in zip(footers, kinds, strict=False):
        if depth_of(kind) != depth_of(kinds[0]):
            rule = f"has rows of one shape in all files; {kinds[0]} in {footers[0].file.path}"
            raise DataError(
                f"data, column {name!r} of {footer.file.path}", f"type {kind}", rule, "write it alike in all files"
            )


def _column(footers: Sequence[Footer], name: str) -> Column:
    """The column, with the narrowest dtype that has all values of its types in the files.

    Raises:
        DataError: there is none, as for 64-bit integers and floats.
    """
    kinds = {kind: footer for footer in reversed(footers) if (kind := _field(footer, name)) is not None}
    if not kinds:
        return Column(name, np.dtype(np.int64), is_key=True)
    dtypes = {dtype: footer.file for kind, footer in kinds.items() if (dtype := dtype_of(kind)) is not None}
    wider = np.result_type(*dtypes)
    if any(not keeps_values(dtype, wider) for dtype in dtypes):
        found = ", ".join(f"{dtype} in {file.path}" for dtype, file in reversed(dtypes.items()))
        rule = f"its types have a common one that has all their values, but {wider} rounds large integers"
        raise DataError(
            f"data, column {name!r}", found, rule, "write it with one type in all files, or leave it out of columns="
        )
    return Column(name, wider, max(map(depth_of, kinds)))


def _is_integer(text: str) -> bool:
    try:
        return abs(int(text)) < 2**63
    except ValueError:
        return False
