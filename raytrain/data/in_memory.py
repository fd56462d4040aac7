"""Which rows do arrays in memory, or a map-style PyTorch dataset, have?

`arrays` holds whole columns; `dataset` calls the user's dataset for one row at a time and stacks the results. Neither
shuffles. Built in the driver, read in workers or in Ray Data's processes, so the user's dataset must be picklable (numpy
columns travel through Ray's object store without a copy). No two threads of a process call a dataset at the same time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raytrain.data.misfits import check_map_style, plain_tensors
from raytrain.data.seeding import ROW, SEEDED_GENERATORS, seeded_generators
from raytrain.data.source import NOTHING, Columns, NotNumbers, Seed, Source, is_tensor, to_array, widened
from raytrain.errors import DataError

CHECKED_ROWS = 4  # of a dataset; read twice where it is given, in the driver


class ArraySource:
    """Columns in memory, all of shape [num_rows, ...]; see `arrays`.

    Args:
        left_out: for each column that cannot become a tensor, what it holds.
    """

    chunk_rows: tuple[int, ...] | None = None
    runs_user_code = decodes = False

    def __init__(self, columns: Columns, left_out: Mapping[str, str] = NOTHING) -> None:
        self._columns, self.left_out = columns, dict(left_out)

    @property
    def num_rows(self) -> int:
        return len(next(iter(self._columns.values())))

    @property
    def columns(self) -> Sequence[str]:
        return tuple(self._columns)

    def take(self, row_ids: NDArray[np.int64], seed: Seed = (0, 0)) -> Columns:
        """The rows with these ids, in this order, as fresh arrays."""
        return {name: values.take(row_ids, axis=0) for name, values in self._columns.items()}

    def fingerprint(self) -> dict[str, Any]:
        """Number of rows, and dtype, row shape and a digest of the values of each column (about a second per GB)."""
        return {"kind": "arrays", "rows": self.num_rows} | {
            f"column {name}": f"{values.dtype} {list(values.shape[1:])} {_digest(values)}"
            for name, values in self._columns.items()
        }


def arrays(**columns: Any) -> ArraySource:
    """A source over columns in memory.

    Args:
        columns: numpy arrays, tensors or nested lists of numbers, each with one entry per row in its first dimension.

    Raises:
        DataError: there are no columns or no rows, the numbers of rows differ, or a column is not numeric.
    """
    return from_columns("arrays()", columns)


def from_columns(where: str, columns: Mapping[str, Any], left_out: Mapping[str, str] = NOTHING) -> ArraySource:
    """A source over columns in memory, as `arrays`; `where` is where they come from, for errors."""
    if not columns:
        raise DataError(where, "no columns", "a dataset has at least one column", "give at least one, as name and values")
    converted = {str(name): to_array(where, str(name), values) for name, values in columns.items()}
    lengths = {name: len(values) for name, values in converted.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise DataError(where, found, "all columns have the same number of rows", "make their first dimensions equal")
    if not next(iter(lengths.values())):
        found = "0 rows in " + ", ".join(converted)
        raise DataError(where, found, "the dataset must not be empty", "check what was loaded")
    return ArraySource(converted, left_out)


class MapStyleDataset(Protocol):
    """A `torch.utils.data.Dataset` with a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class DatasetSource:
    """The rows of a map-style dataset; row 0 sets the columns, their dtypes and row shapes. See `dataset`.

    Attributes:
        left_out: for each column that cannot become a tensor, the type that it has in row 0.
    """

    chunk_rows: tuple[int, ...] | None = None
    runs_user_code = decodes = True

    def __init__(self, rows: MapStyleDataset) -> None:
        self._rows = rows
        self.num_rows = len(rows)
        if not self.num_rows:
            raise DataError(self._where, "0 rows", "the dataset must not be empty", "check what the dataset loaded")
        self.left_out: dict[str, str] = {}
        with seeded_generators() as seed:
            seed(0, 0, 0, ROW)
            self._example = self._first_row(rows[0])
        self._check_rows({i * (self.num_rows - 1) // (CHECKED_ROWS - 1) for i in range(CHECKED_ROWS)})

    @property
    def columns(self) -> Sequence[str]:
        return tuple(self._example)

    def take(self, row_ids: NDArray[np.int64], seed: Seed = (0, 0)) -> Columns:
        """The rows with these ids, in this order. The random numbers of a row follow from `seed` and the row's id.

        Raises:
            DataError: a row has other columns, shapes or dtypes than row 0.
        """
        found = {}
        with seeded_generators() as seed_row:
            for row in row_ids.tolist():
                seed_row(*seed, row, ROW)
                found[row] = self._like_row_0(row, self._rows[row])
        if not found:
            return {name: example[:0].copy() for name, example in self._example.items()}
        return {name: np.concatenate([found[row][name] for row in row_ids.tolist()]) for name in self._example}

    def fingerprint(self) -> dict[str, Any]:
        """Number of rows, columns, dtypes and shapes; not the values, since each row would have to be loaded."""
        kinds = {f"column {name}": f"{value.dtype} {list(value.shape[1:])}" for name, value in self._example.items()}
        return {"kind": f"dataset {type(self._rows).__name__}", "rows": self.num_rows, **kinds}

    @property
    def _where(self) -> str:
        return f"dataset({type(self._rows).__name__})"

    def _first_row(self, item: Any) -> Columns:
        """The columns of row 0 that become tensors; notes why the others do not."""
        where, columns = f"{self._where}, row 0", {}
        for name, value in _named(item).items():
            try:
                columns[name] = to_array(where, name, _with_row_dimension(value))
            except NotNumbers as error:
                self.left_out[name] = error.value
        if not columns:
            found = ", ".join(f"{name} ({reason})" for name, reason in self.left_out.items()) or "no columns"
            raise DataError(where, found, "at least one column can become a tensor", "return numbers, arrays or tensors")
        return columns

    def _check_rows(self, rows: Iterable[int]) -> None:
        """Raises DataError for a row unlike row 0, or one that is not the same when it is read again with the same seed."""
        for row in sorted(rows):
            first, again = self.take(np.array([row])), self.take(np.array([row]))
            for name in self.columns:
                if first[name].tobytes() != again[name].tobytes():
                    fix = (
                        "draw from them, or make a generator in __getitem__: np.random.default_rng(np.random.randint(2**31))"
                    )
                    raise DataError(
                        f"{self._where}, row {row}, column {name!r}", "differs each time it is read", SEEDED_GENERATORS, fix
                    )

    def _like_row_0(self, row: int, item: Any) -> Columns:
        """One row as columns of shape [1, ...]."""
        named, where = _named(item), f"{self._where}, row {row}"
        if named.keys() - self.left_out != self._example.keys():
            rule = "has the columns of row 0: " + ", ".join(self._example)
            raise DataError(where, "columns " + ", ".join(named), rule, "return the same names for each row")
        columns = {}
        for name, example in self._example.items():
            value = to_array(where, name, _with_row_dimension(named[name]))
            converted = widened(value, example.dtype)
            if converted is None or value.shape != example.shape:
                found = f"{value.dtype} {list(value.shape[1:])}" + (f": {value[0]}" if value.ndim == 1 else "")
                rule = f"each row is like row 0: {example.dtype} {list(example.shape[1:])}"
                fix = "pad or cut the rows, and return one type"
                raise DataError(f"{where}, column {name!r}", found, rule, fix)
            columns[name] = converted
        return columns


def dataset(map_style: MapStyleDataset) -> Source:
    """A source over a map-style dataset, such as those of torchvision.

    Where torch, numpy.random or random draw numbers in `__getitem__`, these follow from the run's seed, the epoch and the
    row: a row is augmented alike on any worker, and in each epoch differently; for evaluation always alike.

    Args:
        map_style: returns for each index a mapping of names to tensors, arrays or numbers of a fixed shape, or a tuple
            of them, whose columns are then named "0", "1", and so on. Columns that are not numbers are left out.

    Raises:
        DataError: it is not a map-style dataset, is empty, has no numbers in row 0, or a row differs each time it is read.
    """
    check_map_style("dataset()", map_style)
    if (tensors := plain_tensors(map_style)) is not None:
        return from_columns("dataset(TensorDataset)", {str(i): tensor for i, tensor in enumerate(tensors)})
    return DatasetSource(map_style)


def _digest(values: NDArray[Any]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, digest_size=8).hexdigest()


def _named(item: Any) -> dict[str, Any]:
    """What a dataset returns for one row, by column name."""
    if isinstance(item, (tuple, list)):
        return {str(position): value for position, value in enumerate(item)}
    return {str(name): value for name, value in item.items()} if isinstance(item, Mapping) else {"0": item}


def _with_row_dimension(value: Any) -> Any:
    """A value with a first dimension of 1."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)[None]
    return value[None] if is_tensor(value) else [value]
