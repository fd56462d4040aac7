"""Which Parquet files are meant, and what do their footers say?

Finds files below paths, on any filesystem that pyarrow knows, and reads footers with a few threads. It reads no
values. Runs in the driver, where the source is built.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from glob import glob, has_magic
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from raytrain.errors import DataError

FOOTER_THREADS = 8
_KEY = re.compile(r"([^=/]+)=([^=/]*)")


@dataclass(frozen=True)
class File:
    """A Parquet file: its path on the filesystem, the path below its root, and its size."""

    path: str
    name: str
    size_bytes: int

    @property
    def keys(self) -> dict[str, str]:
        """Partition keys in its path, such as year=2024."""
        matches = (_KEY.fullmatch(part) for part in posixpath.dirname(self.name).split("/"))
        return {match[1]: match[2] for match in matches if match}


@dataclass(frozen=True)
class Footer:
    """What the footer of a file says.

    Args:
        file: whose it is.
        schema: its columns.
        group_rows: rows of each row group.
        num_values: for each top-level column and row group, its innermost values, nulls and empty lists included.
        num_nulls: for each top-level column, its innermost nulls over all row groups; None where it is not told.
    """

    file: File
    schema: pa.Schema
    group_rows: tuple[int, ...]
    num_values: dict[str, list[int]]
    num_nulls: dict[str, int | None]

    @property
    def num_rows(self) -> int:
        return sum(self.group_rows)


def find_files(paths: Any, filesystem: fs.FileSystem | None) -> tuple[fs.FileSystem, list[File]]:
    """The files that paths stand for, in the order of the paths and sorted below each directory and glob.

    Raises:
        DataError: a path does not exist, or has no Parquet files.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        raise DataError("parquet()", "no paths", "there is a path at least", "give a file, a directory or a list of them")
    texts = [str(os.fspath(path)) for path in given]
    if filesystem is None:
        filesystem = fs.FileSystem.from_uri(texts[0])[0] if "://" in texts[0] else fs.LocalFileSystem()
    files = [file for text in texts for file in _below(_plain_path(text, filesystem), filesystem)]
    if len(texts) > 1:
        root = posixpath.commonpath([posixpath.dirname(file.path) for file in files])
        files = [File(file.path, posixpath.relpath(file.path, root), file.size_bytes) for file in files]
    return filesystem, files


def read_footers(filesystem: fs.FileSystem, files: Sequence[File]) -> list[Footer]:
    """The footer of each file.

    Raises:
        DataError: a file is not a whole Parquet file.
    """
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        return list(pool.map(lambda file: _read_footer(filesystem, file), files))


def unreadable(file: File, error: Exception) -> DataError:
    """The error for a file that pyarrow cannot read."""
    what = "0 bytes" if not file.size_bytes else str(error).splitlines()[0]
    fix = "write the file again, or leave it out"
    return DataError(f"data, file {file.path}", what, "is a whole, readable Parquet file", fix)


def _plain_path(text: str, filesystem: fs.FileSystem) -> str:
    """A path or URI as a path on the filesystem; local ones absolute, since workers run in other directories."""
    if "://" in text:
        return str(fs.FileSystem.from_uri(text)[1])
    return os.path.abspath(os.path.expanduser(text)) if isinstance(filesystem, fs.LocalFileSystem) else text


def _below(path: str, filesystem: fs.FileSystem) -> list[File]:
    if has_magic(path) and isinstance(filesystem, fs.LocalFileSystem) and not os.path.exists(path):
        fixed = path[: re.search(r"[*?\[]", path).start()]  # type: ignore[union-attr]
        found = sorted(name for name in glob(path, recursive=True) if os.path.isfile(name))
        infos, root = filesystem.get_file_info(found), posixpath.dirname(fixed)
    else:
        info = filesystem.get_file_info(path)
        if info.type == fs.FileType.NotFound:
            raise DataError("data", path, "the path exists", "correct the path given to parquet()")
        if info.type == fs.FileType.File:
            infos, root = [info], posixpath.dirname(info.path)
        else:
            infos, root = _walk(path, filesystem), path.rstrip("/")
    files = [File(info.path, posixpath.relpath(info.path, root or "."), info.size or 0) for info in infos]
    if not files:
        raise DataError("data", path, "has Parquet files (*.parquet)", "correct the path given to parquet()")
    return files


def _walk(directory: str, filesystem: fs.FileSystem) -> list[Any]:
    """Parquet files below a directory, without hidden ones (whose names begin with "." or "_"), sorted by path."""
    infos = filesystem.get_file_info(fs.FileSelector(directory, recursive=True))
    names = {info.path: posixpath.relpath(info.path, directory) for info in infos}
    return sorted(
        (
            info
            for info in infos
            if info.type == fs.FileType.File
            and info.path.endswith(".parquet")
            and not any(part.startswith((".", "_")) for part in names[info.path].split("/"))
        ),
        key=lambda info: info.path,
    )


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
        told = [c.statistics.null_count if c.statistics and c.statistics.has_null_count else None for c in chunks]
        nulls[name] = None if None in told else sum(count for count in told if count is not None)
    return Footer(file, schema, tuple(group.num_rows for group in groups), values, nulls)


def _top_level(path: str, names: Sequence[str]) -> str:
    """The column to which a leaf such as x.list.element belongs; names may have dots themselves."""
    while path not in names and "." in path:
        path = path.rpartition(".")[0]
    return path
