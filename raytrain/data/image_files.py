"""Which image files are rows, in which order, and which label and other columns does each have?

Lists a folder, whose subfolders are classes, or reads a table that names a file per row, and sees that all files exist by
listing their directories. Opens no image. Runs in the driver, where the source is built.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv, fs

from raytrain.data.misfits import is_a
from raytrain.data.source import Columns, NotNumbers, missing_column, to_array
from raytrain.errors import DataError

SUFFIXES = ".png", ".jpg", ".jpeg", ".webp"


@dataclass(frozen=True)
class ImageFiles:
    """The files, in the order of the rows.

    Args:
        filesystem: where they are.
        root: directory that `names` start from.
        names: their paths as found or given.
        sizes: their sizes in bytes, shape [rows].
        columns: all columns but the image.
        classes: names of the classes by number; None where no column has them.
        left_out: for each column that cannot become a tensor, the reason.
    """

    filesystem: fs.FileSystem
    root: str
    names: Sequence[str]
    sizes: NDArray[np.int64]
    columns: Columns
    classes: tuple[str, ...] | None
    left_out: Mapping[str, str]

    def path(self, row: int) -> str:
        return posixpath.join(self.root, self.names[row])


@dataclass(frozen=True)
class Table:
    """The columns of a table, by name.

    Args:
        where: where it comes from, for errors.
        columns: names and values.
        path: name of the column of paths.
        label: name of the column whose texts become numbers of classes.
        root: directory that paths start from.
    """

    where: str
    columns: Sequence[tuple[str, Any]]
    path: str
    label: str
    root: str


def find_images(
    given: Any,
    path: str,
    label: str,
    root: str | PathLike[str] | None,
    classes: Sequence[str] | None,
    filesystem: fs.FileSystem | None,
) -> ImageFiles:
    """The files of a folder or a table, given as to `images`.

    Raises:
        DataError: a path is missing or is no image, there are no rows, or labels are not among `classes`.
    """
    if not isinstance(given, (str, PathLike)):
        filesystem, start = _located(os.curdir if root is None else root, filesystem)
        return _of_table(filesystem, Table("images()", _columns_of(given), path, label, start), classes)
    filesystem, place = _located(given, filesystem)
    info = filesystem.get_file_info(place)
    if info.type == fs.FileType.NotFound:
        raise DataError("data", place, "the path exists", "correct the path given to images()")
    if info.type == fs.FileType.Directory:
        return _of_folder(filesystem, place, classes)
    start = posixpath.dirname(place) if root is None else _located(root, filesystem)[1]
    return _of_table(filesystem, Table(f"data, {place}", _read_csv(filesystem, place, path), path, label, start), classes)


def _located(given: str | PathLike[str], filesystem: fs.FileSystem | None) -> tuple[fs.FileSystem, str]:
    """A filesystem and a path on it; absolute if local, since workers run in other directories."""
    text = str(os.fspath(given))
    if "://" in text:
        found, path = fs.FileSystem.from_uri(text)
        return filesystem or found, str(path)
    filesystem = filesystem or fs.LocalFileSystem()
    return filesystem, os.path.abspath(os.path.expanduser(text)) if isinstance(filesystem, fs.LocalFileSystem) else text


def _of_folder(filesystem: fs.FileSystem, folder: str, classes: Sequence[str] | None) -> ImageFiles:
    prefix = posixpath.join(folder, "")
    found = filesystem.get_file_info(fs.FileSelector(folder, recursive=True))
    infos = {info.path.removeprefix(prefix): info for info in found}
    names = sorted(name for name in infos if not any(part.startswith(".") for part in name.split("/")))
    folders = [name for name in names if infos[name].type == fs.FileType.Directory and "/" not in name]
    files = [name for name in names if infos[name].type != fs.FileType.Directory]
    _check_files(prefix, files, folders)
    sizes = np.array([infos[name].size or 0 for name in files], dtype=np.int64)
    if not folders:
        if classes is not None:
            raise _without_labels(f"data, folder {folder}", "no subfolders")
        return ImageFiles(filesystem, folder, files, sizes, {}, None, {})
    of_files = [name.split("/")[0] for name in files]
    empty = sorted({*folders} - {*of_files})
    if empty and classes is None:
        fix = "remove it, or name all classes with images(..., classes=[...])"
        raise DataError("data", f"no images in the subfolder {prefix}{empty[0]}", "each class has images", fix)
    numbers, classes = _numbered(f"data, folder {folder}", of_files, classes)
    return ImageFiles(filesystem, folder, files, sizes, {"label": numbers}, classes, {})


def _check_files(prefix: str, files: Sequence[str], folders: Sequence[str]) -> None:
    """Raises DataError where a folder has files that are no images, or images beside its subfolders, or none."""
    for name in files:
        if not name.lower().endswith(SUFFIXES):
            fix = "move it out of the folder, or let its name begin with a dot"
            raise DataError("data", f"{prefix}{name}", f"all files are images: {', '.join(SUFFIXES)}", fix)
        if folders and "/" not in name:
            rule = f"all images are in subfolders, the classes, where there are some, such as {folders[0]}"
            raise DataError("data", f"{prefix}{name}", rule, "move it to the subfolder of its class")
    if not files:
        raise DataError("data", prefix, f"has images: {', '.join(SUFFIXES)}", "correct the path given to images()")


def _of_table(filesystem: fs.FileSystem, table: Table, classes: Sequence[str] | None) -> ImageFiles:
    values = dict(table.columns)
    if len(values) < len(table.columns):
        found = "columns " + ", ".join(name for name, _ in table.columns)
        raise DataError(table.where, found, "each column has a name of its own", "rename the columns")
    if table.path not in values:
        raise missing_column("images(path=...)", table.path, values)
    names = _paths(table, values.pop(table.path))
    columns: Columns = {}
    left_out, numbered = {}, None
    for name, column in values.items():
        try:
            columns[name] = to_array(table.where, name, column)
        except NotNumbers as error:
            if name == table.label:
                columns[name], numbered = _numbered(f"{table.where}, column {name!r}", _entries(column), classes)
            else:
                left_out[name] = error.value
    if classes is not None and numbered is None:
        raise _without_labels(table.where, f"no column {table.label!r} of texts")
    _check_columns(table.where, len(names), columns)
    return ImageFiles(filesystem, table.root, names, _sizes(filesystem, table, names), columns, numbered, left_out)


def _check_columns(where: str, num_rows: int, columns: Columns) -> None:
    if "image" in columns:
        raise DataError(where, "a column named image", "`image` is the column of pixels", "rename the table's column")
    for name, values in columns.items():
        if len(values) != num_rows:
            found, rule = f"{len(values)} rows", f"all columns have as many rows as there are paths, {num_rows}"
            raise DataError(f"{where}, column {name!r}", found, rule, "make their lengths equal")


def _paths(table: Table, column: Any) -> list[str]:
    """The column of paths as texts. Raises DataError for one that is no path, or if there are none."""
    entries = _entries(column)
    for row, entry in enumerate(entries):
        if not isinstance(entry, (str, PathLike)) or not str(entry):
            where = f"{table.where}, column {table.path!r}, row {row}"
            raise DataError(where, repr(entry), "is the path of an image", "fill it, or leave the row out")
    if not entries:
        raise DataError(table.where, "0 rows", "the dataset must not be empty", "check what was loaded")
    return [str(os.fspath(entry)) for entry in entries]


def _sizes(filesystem: fs.FileSystem, table: Table, names: Sequence[str]) -> NDArray[np.int64]:
    """The size of each file in bytes; lists each directory once.

    Raises:
        DataError: a file does not exist.
    """
    paths = [posixpath.split(posixpath.join(table.root, name)) for name in names]
    listed: dict[str, dict[str, int]] = {}
    for directory in dict.fromkeys(directory for directory, _ in paths):
        infos = filesystem.get_file_info(fs.FileSelector(directory, allow_not_found=True))
        listed[directory] = {info.base_name: info.size for info in infos if info.is_file}
    for row, (directory, name) in enumerate(paths):
        if name not in listed[directory]:
            where, found = f"{table.where}, row {row}", posixpath.join(directory, name)
            fix = "correct the path, or say with images(..., root=...) where paths start"
            raise DataError(where, found, "the file exists", fix)
    return np.array([listed[directory][name] for directory, name in paths], dtype=np.int64)


def _numbered(where: str, labels: Sequence[Any], classes: Sequence[str] | None) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The number of the class of each row, and the names of the classes: all labels in order, if not given."""
    for row, label in enumerate(labels):
        if not isinstance(label, str) or not label:
            raise DataError(f"{where}, row {row}", repr(label), "each label is a text", "fill it, or leave the row out")
    names = tuple(sorted(set(labels)) if classes is None else classes)
    numbers = {name: number for number, name in enumerate(names)}
    if len(numbers) < len(names):
        raise DataError("images(classes=...)", ", ".join(names), "each name is there once", "remove the others")
    for row, label in enumerate(labels):
        if label not in numbers:
            rule = "is one of the classes given, " + ", ".join(names)
            raise DataError(f"{where}, row {row}", repr(label), rule, "correct the label, or add it to classes=")
    return np.array([numbers[label] for label in labels], dtype=np.int64), names


def _without_labels(where: str, found: str) -> DataError:
    return DataError(where, found, "images(classes=...) names the classes of labels", "leave classes= out, or add labels")


def _columns_of(given: Any) -> list[tuple[str, Any]]:
    """Names and values of the columns of a dictionary or a DataFrame."""
    if isinstance(given, Mapping):
        return [(str(name), values) for name, values in given.items()]
    if is_a(given, "pandas.DataFrame"):
        series = [given.iloc[:, position] for position in range(len(given.columns))]
        return [(str(one.name), one.tolist() if one.dtype == object else one) for one in series]
    rule, fix = (
        "is a folder, a CSV file, a DataFrame or columns by name",
        "give one of them; decoded images go to raytrain.arrays",
    )
    raise DataError("images()", type(given).__name__, rule, fix)


def _read_csv(filesystem: fs.FileSystem, place: str, path: str) -> list[tuple[str, Any]]:
    """Names and values of the columns of a CSV file with a header."""
    if ".csv" not in posixpath.basename(place).lower():
        raise DataError("data", place, "is a folder or a CSV file (.csv)", "correct the path given to images()")
    try:
        with filesystem.open_input_stream(place) as stream:
            table = csv.read_csv(stream, convert_options=csv.ConvertOptions(column_types={path: pa.string()}))
    except (pa.ArrowInvalid, OSError) as error:
        fix = "write the file again"
        raise DataError(f"data, {place}", str(error).partition("\n")[0], "is a CSV file with a header", fix) from error
    return list(zip(table.column_names, table.columns, strict=True))


def _entries(column: Any) -> list[Any]:
    entries: list[Any] = np.asarray(column).tolist()
    return entries
