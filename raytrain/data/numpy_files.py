"""How are rows of .npy and .npz files read, without loading all of a large file?

A file holds all rows, in the first dimension of its arrays, or it holds one row. The driver reads headers; values are read
when taken, in workers or in Ray Data's processes. Arrays with all rows are memory-mapped, also inside of an uncompressed
.npz; those of a compressed .npz are decompressed whole, once per process. Never unpickles. Each error names the file.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import struct
import threading
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from glob import escape, glob, has_magic
from itertools import pairwise
from os import PathLike
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from raytrain.data.source import Columns, NotNumbers, Seed, to_array
from raytrain.errors import DataError

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]
Kind = tuple[np.dtype[Any], tuple[int, ...]]
"""The dtype and the row shape of a column."""

HEADER_THREADS, HEADERS_AT_ONCE = 8, 1000
LOCAL_HEADER = struct.Struct("<26x2H")  # of a zip member; ends with the lengths of the name and the extra field that follow
UNREADABLE = (
    *(OSError, ValueError, TypeError, SyntaxError, tokenize.TokenError, struct.error),
    *(zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError),
)
"""What numpy and zipfile raise for damaged files; the last two for unknown compression and for encryption."""


class _Header(NamedTuple):
    """An array in a file; `offset` is where its values begin in the file, None where they are compressed."""

    stored: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    offset: int | None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in native byte order."""
        return self.stored.newbyteorder("=")


class _OneFile:
    """A file with all rows: a .npy, which is the column `name`, or a .npz, whose members are the columns."""

    def __init__(self, path: str, name: str | None) -> None:
        self._path, self._name = path, name
        self._headers, self.left_out = _numeric(path, name)
        self._size_bytes = os.path.getsize(path)
        for column, header in self._headers.items():
            if not header.shape:
                raise DataError(_column(path, column), "one number", "has one entry per row", "write an array of all rows")
        lengths = {column: header.shape[0] for column, header in self._headers.items()}
        _check_equal(f"data, file {path}", lengths)
        self.num_rows = next(iter(lengths.values()))
        self.kinds: dict[str, Kind] = {column: (h.dtype, h.shape[1:]) for column, h in self._headers.items()}
        self.__setstate__({})

    @property
    def files(self) -> list[tuple[str, int]]:
        return [(os.path.basename(self._path), self._size_bytes)]

    def take(self, row_ids: NDArray[np.int64]) -> Columns:
        with _readable(self._path):
            size_bytes = os.path.getsize(self._path)
        if size_bytes != self._size_bytes:  # reading a page of the map that is not in the file would kill the process
            raise _changed(f"data, file {self._path}", f"{size_bytes} bytes", f"{self._size_bytes} bytes")
        taken = {column: self._array(column)[row_ids] for column in self._headers}  # ndarray.take may copy all rows
        return {column: np.ascontiguousarray(values, self.kinds[column][0]) for column, values in taken.items()}

    def _array(self, column: str) -> NDArray[Any]:
        """All rows of a column, mapped or decompressed when first needed."""
        header = self._headers[column]
        with self._lock, _readable(self._path):
            if column not in self._arrays:
                for name, found, stream in _opened(self._path, self._name):
                    if name == column and found == header:
                        self._arrays[column] = _all_rows(self._path, found, stream)
            if column not in self._arrays:
                raise _changed(_column(self._path, column), "another header", _described(header))
            return self._arrays[column]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_arrays", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._arrays: Columns = {}
        self._lock = threading.Lock()


class _FilePerRow:
    """Files with one row each: .npy, which are the column `name`, or .npz, whose members are the columns."""

    def __init__(self, paths: Sequence[str], name: str | None, is_listed: bool) -> None:
        first, self.left_out = _numeric(paths[0], name)
        self._name, self.is_listed = name, is_listed
        directories = [os.path.dirname(path) for path in (min(paths), max(paths))]
        self._root = os.path.join(os.path.commonpath(directories), "")
        self.names = [path.removeprefix(self._root) for path in paths]
        self.kinds: dict[str, Kind] = {column: (header.dtype, header.shape) for column, header in first.items()}
        parts = [paths[i : i + HEADERS_AT_ONCE] for i in range(0, len(paths), HEADERS_AT_ONCE)]
        with ThreadPoolExecutor(HEADER_THREADS) as pool:
            self._sizes = np.concatenate(list(pool.map(self._checked_sizes, parts)))

    @property
    def num_rows(self) -> int:
        return len(self.names)

    @property
    def files(self) -> list[tuple[str, int]]:
        return list(zip(self.names, self._sizes.tolist(), strict=True))

    def take(self, row_ids: NDArray[np.int64]) -> Columns:
        taken = {column: np.empty((len(row_ids), *shape), dtype) for column, (dtype, shape) in self.kinds.items()}
        for position, row in enumerate(row_ids.tolist()):
            path = self._root + self.names[row]
            found = {}
            with _readable(path):
                for column, header, stream in _opened(path, self._name):
                    found[column] = header
                    if self.kinds.get(column) == (header.dtype, header.shape):
                        taken[column][position] = _values(header, stream)
            self._check_like_first(path, found)
        return taken

    def _checked_sizes(self, paths: Sequence[str]) -> NDArray[np.int64]:
        for path in paths:
            self._check_like_first(path, _headers(path, self._name))
        return np.array([os.path.getsize(path) for path in paths], dtype=np.int64)

    def _check_like_first(self, path: str, headers: Mapping[str, _Header]) -> None:
        for column in dict.fromkeys([*self.kinds, *headers]):
            kind, header = self.kinds.get(column), headers.get(column)
            if column not in self.left_out and kind != (header and (header.dtype, header.shape)):
                like = f"{kind[0]} {list(kind[1])}" if kind else "absent"
                rule = f"is like the first row, {self._root}{self.names[0]}: {like}"
                fix = "write all rows with one dtype and shape, and not while a run reads them"
                raise DataError(_column(path, column), _described(header), rule, fix)


class NumpySource:
    """Rows of .npy and .npz files; see `numpy`.

    Attributes:
        left_out: for each member of archives that cannot become a tensor, and is not read, the reason.
    """

    chunk_rows: tuple[int, ...] | None = None
    runs_user_code = False
    decodes = False

    def __init__(self, parts: Sequence[_OneFile | _FilePerRow]) -> None:
        self._parts = parts
        self.num_rows = parts[0].num_rows
        self.columns: Sequence[str] = tuple(column for part in parts for column in part.kinds)
        self.left_out: Mapping[str, str] = {name: why for part in parts for name, why in part.left_out.items()}

    def take(self, row_ids: NDArray[np.int64], seed: Seed = (0, 0)) -> Columns:
        """The rows with these ids, in this order.

        Raises:
            DataError: a file is damaged, or is not as it was when the source was built.
        """
        return {name: values for part in self._parts for name, values in part.take(row_ids).items()}

    def fingerprint(self) -> dict[str, Any]:
        """Totals, columns with dtypes and row shapes, and a digest of names and sizes of the files; not the values."""
        files = [file for part in self._parts for file in part.files]
        kinds = {name: kind for part in self._parts for name, kind in part.kinds.items()}
        return {
            "kind": "numpy",
            "files": len(files),
            "rows": self.num_rows,
            "bytes": sum(size_bytes for _, size_bytes in files),
            "columns": ", ".join(f"{name}: {dtype} {list(shape)}" for name, (dtype, shape) in kinds.items()),
            "digest": hashlib.blake2b(repr(files).encode(), digest_size=16).hexdigest(),
        }


def numpy(archives: Paths | None = None, /, **columns: Paths) -> NumpySource:
    """A source over .npy and .npz files, which are local or on storage that all nodes mount at the same path.

        numpy("data.npz")                                 one archive: its members are columns with all rows
        numpy("poses")                                    a .npz per row: its members are the columns of that row
        numpy(heatmaps="heatmaps.npy", label="label.npy") one .npy per column, with all rows
        numpy(heatmaps="heatmaps", label="label.npy")     a .npy per row, and one with all rows

    A path to a file is a file with all rows. A directory (all files below it), a glob (both in the order of their paths) or
    a list of paths (in its order) is a file per row. Where two columns have a file per row, their file names must agree.

    Args:
        archives: .npz files. Members that are no numbers are left out.
        columns: .npy files by name of the column.

    Raises:
        DataError: a file is missing or damaged, there are no rows, the columns do not fit each other, or a column cannot
            become a tensor.
    """
    given = ([] if archives is None else [(None, archives)]) + list(columns.items())
    if not given:
        raise DataError("numpy()", "no paths", "at least one path is required", "give a .npz, or a .npy as name and path")
    parts = [_part(name, paths) for name, paths in given]
    _check_equal("numpy()", {name: part.num_rows for part in parts for name in part.kinds})
    if not parts[0].num_rows:
        raise DataError("numpy()", "0 rows", "the dataset must not be empty", "correct the path, or write rows")
    for name in columns:
        if archives is not None and name in parts[0].kinds:
            raise DataError("numpy()", f"column {name!r} twice", "the archives have a member of that name", "rename one")
    _check_pairs([part for part in parts if isinstance(part, _FilePerRow)], len(parts))
    return NumpySource(parts)


def _part(name: str | None, given: Any) -> _OneFile | _FilePerRow:
    """The rows that a column or the archives have."""
    where, suffix = ("numpy()", ".npz") if name is None else (f"numpy({name}=...)", ".npy")
    is_listed = isinstance(given, (list, tuple))
    texts = [_local_path(where, path) for path in (given if is_listed else [given])]
    paths = texts if is_listed else _below(texts[0], suffix)
    if not paths:
        found, rule = (texts or ["no paths"])[0], f"has rows, as {suffix} files"
        other = "archives (.npz) are given without a name" if name else "columns (.npy) are given as name and path"
        raise DataError(where, found, rule, f"correct the path; {other}")
    for path in paths:
        if not path.endswith(suffix):
            fix = "write raytrain.numpy(path) for a .npz, raytrain.numpy(x=path) for a .npy, which is one column"
            raise DataError(where, path, f"is a {suffix} file", fix)
    is_one = paths == texts and not is_listed
    return _OneFile(paths[0], name) if is_one else _FilePerRow(paths, name, is_listed)


def _local_path(where: str, given: Any) -> str:
    """An absolute path, since workers run in other directories."""
    if not isinstance(given, (str, PathLike)):
        rule, fix = "is a path, or a list of paths", "give text or a Path; raytrain.arrays(x=values) takes data in memory"
        raise DataError(where, type(given).__name__, rule, fix)
    text = str(os.fspath(given))
    if "://" in text:
        fix = "copy the files to storage that all nodes mount"
        raise DataError(where, text, "is a path of a mounted filesystem, since files are memory-mapped", fix)
    return os.path.abspath(os.path.expanduser(text))


def _below(path: str, suffix: str) -> list[str]:
    """The files that a path names: those below a directory or of a glob, sorted and without hidden ones, or itself."""
    if os.path.isdir(path):
        return sorted(glob(f"{escape(path)}/**/*{suffix}", recursive=True))
    if has_magic(path) and not os.path.exists(path):
        return sorted(glob(path, recursive=True))
    return [path]


def _check_pairs(parts: Sequence[_FilePerRow], num_parts: int) -> None:
    """Raises DataError where file names do not show that rows of different columns belong together."""
    for part in parts[1:]:
        for row, names in enumerate(zip(parts[0].names, part.names, strict=True)):
            one, other = (os.path.splitext(os.path.basename(name))[0] for name in names)
            if one != other:
                rule = "files of one row have the same name in all columns, but for the suffix"
                found = ", ".join(f"{next(iter(p.kinds))}: {p.names[row]}" for p in (parts[0], part))
                raise DataError(f"numpy(), row {row}", found, rule, "rename the files, or write those that are missing")
    for part in parts if len(parts) < num_parts else ():
        for one, other in pairwise([] if part.is_listed else part.names):
            if _numbers_as_such(one) > _numbers_as_such(other):
                rule = "where another file has all rows, names are in the order of the numbers in them, too"
                fix = "pad the numbers with zeros, or give a list of paths in the order of the rows"
                raise DataError(f"numpy(), column {next(iter(part.kinds))!r}", f"{one} before {other}", rule, fix)


def _numbers_as_such(name: str) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _check_equal(where: str, lengths: Mapping[str, int]) -> None:
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise DataError(where, found, "all columns have the same number of rows", "write as many rows of each")


def _headers(path: str, name: str | None) -> dict[str, _Header]:
    with _readable(path):
        return {column: header for column, header, _ in _opened(path, name)}


def _numeric(path: str, name: str | None) -> tuple[dict[str, _Header], Mapping[str, str]]:
    """The arrays of a file that become tensors, and for each other member of an archive the reason.

    Raises:
        DataError: there are none.
    """
    headers, left_out = _headers(path, name), {}
    for column, header in headers.items():
        try:
            to_array(f"data, file {path}", column, np.empty(0, header.stored))
        except NotNumbers as error:
            if name is not None:
                raise
            left_out[column] = error.value
    if len(left_out) == len(headers):
        found = ", ".join(f"{column} ({reason})" for column, reason in left_out.items()) or "no arrays"
        raise DataError(f"data, file {path}", found, "at least one array can become a tensor", "write an array of numbers")
    return {column: header for column, header in headers.items() if column not in left_out}, left_out


def _opened(path: str, name: str | None) -> Iterator[tuple[str, _Header, IO[bytes]]]:
    """Each array of a file, by column, as a stream that stands behind the header."""
    with open(path, "rb") as file:
        if name is not None:
            yield name, _read_header(file, os.fstat(file.fileno()).st_size, 0), file
            return
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if member.filename.endswith(".npy"):
                    start = _start(file, member) if member.compress_type == zipfile.ZIP_STORED else None
                    with archive.open(member) as stream:
                        yield member.filename[: -len(".npy")], _read_header(stream, member.file_size, start), stream


def _start(file: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Where the content of a stored member begins in the archive; its extra field may differ from the directory's."""
    file.seek(member.header_offset)
    name_bytes, extra_bytes = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
    return int(member.header_offset + LOCAL_HEADER.size + name_bytes + extra_bytes)


def _read_header(stream: IO[bytes], size_bytes: int, start: int | None) -> _Header:
    """Reads the header of an array of a file or member of this size, which begins at `start` in the file."""
    version = npy.read_magic(stream)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"version {version[0]}.{version[1]} of the format")
    shape, is_fortran, stored = read(stream)
    header_bytes = stream.tell()
    expected = header_bytes + math.prod(shape) * stored.itemsize
    if size_bytes != expected and not stored.hasobject:
        raise ValueError(f"{size_bytes} bytes, not {expected} as its header says")
    return _Header(stored, shape, is_fortran, None if start is None else start + header_bytes)


def _values(header: _Header, stream: IO[bytes]) -> NDArray[Any]:
    """The values of an array, read whole; zipfile compares their checksum."""
    return np.frombuffer(stream.read(), header.stored).reshape(header.shape, order="F" if header.is_fortran else "C")


def _all_rows(path: str, header: _Header, stream: IO[bytes]) -> NDArray[Any]:
    if header.offset is None:
        return _values(header, stream)
    order: Literal["F", "C"] = "F" if header.is_fortran else "C"
    return np.asarray(np.memmap(path, header.stored, "r", header.offset, header.shape, order))


@contextmanager
def _readable(path: str) -> Iterator[None]:
    """Raises DataError, which names the file, where it is missing or damaged."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError("data", path, "the path exists", "correct the path given to numpy()") from error
    except UNREADABLE as error:
        found = str(error).partition("\n")[0]
        rule = f"is a complete, readable {os.path.splitext(path)[1]} file"
        raise DataError(f"data, file {path}", found, rule, "write the file again, or leave it out") from error


def _changed(where: str, found: str, before: str) -> DataError:
    rule = f"is as it was when the run began: {before}"
    return DataError(where, found, rule, "do not write the files while a run reads them")


def _column(path: str, column: str) -> str:
    return f"data, column {column!r} of {path}"


def _described(header: _Header | None) -> str:
    return f"{header.dtype} {list(header.shape)}" if header else "absent"
