"""Which rows do datasets of other libraries have, that hold Arrow tables: those of Ray Data and of Hugging Face?

A Ray Dataset is computed once; its blocks stay in Ray's object store, and pieces of them are the chunks. A Hugging Face
dataset is memory-mapped from its files. Columns of numbers, and of lists of them, are read. Built in the driver, read in
workers or in Ray Data's processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raytrain.data.arrow import PAD_OR_CUT, Kinds, Unfit, decode, digest_of, dtype_of, take_from_chunks, whole
from raytrain.data.misfits import is_a, misfit
from raytrain.data.source import Columns, Seed, empty_columns
from raytrain.errors import DataError

CHUNK_BYTES = 8 * 2**20  # of a block that are decoded at once


class RayDatasetSource:
    """The rows of a Ray Dataset; see `ray`.

    Args:
        blocks: references to Arrow tables.
        facts: of each block: rows, bytes, and a digest of its values.
        kinds: of the columns that are read.
        left_out: for each other column, its type.
    """

    runs_user_code = decodes = False

    def __init__(
        self, blocks: Sequence[Any], facts: Sequence[tuple[int, int, str]], kinds: Kinds, left_out: Mapping[str, str]
    ) -> None:
        self._blocks, self._facts, self._kinds, self.left_out = list(blocks), list(facts), dict(kinds), dict(left_out)
        self._chunks = [
            (block, start, min(size, rows - start))
            for block, (rows, num_bytes, _) in enumerate(facts)
            for size in [max(1, rows * CHUNK_BYTES // max(num_bytes, 1))]
            for start in range(0, rows, size)
        ]
        self._ends = np.cumsum([rows for _, _, rows in self._chunks])

    @property
    def num_rows(self) -> int:
        return int(self._ends[-1])

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        return tuple(rows for _, _, rows in self._chunks)

    @property
    def columns(self) -> Sequence[str]:
        return tuple(self._kinds)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks in Ray's object store, or spilled from it."""
        return sum(num_bytes for _, num_bytes, _ in self._facts)

    def take(self, row_ids: NDArray[np.int64], seed: Seed = (0, 0)) -> Columns:
        """The rows with these ids, in this order.

        Raises:
            DataError: a column has nulls, or rows of another type or shape than the first one; or a block is lost.
        """
        return take_from_chunks(row_ids, self._ends, self._kinds, self._read)

    def fingerprint(self) -> dict[str, Any]:
        """Number of rows, dtypes and shapes, and a digest of all values."""
        digest = hashlib.blake2b("".join(digest for _, _, digest in self._facts).encode(), digest_size=16).hexdigest()
        return {"kind": "Ray Dataset", "rows": self.num_rows} | _described(self._kinds) | {"digest": digest}

    def _read(self, chunk: int) -> Columns:
        import ray as ray_core

        block, start, rows = self._chunks[chunk]
        where = f"Ray Dataset, block {block}"
        try:
            table = ray_core.get(self._blocks[block]).slice(start, rows)
        except ray_core.exceptions.RayError as error:
            rule = "blocks stay in Ray's object store until the run ends, but this one was lost with its node"
            fix = "write the rows once, dataset.write_parquet(path), and use raytrain.parquet(path)"
            raise DataError(where, str(error).partition("\n")[0], rule, fix) from error
        return _decoded(where, table, self._kinds, range(start, start + rows))


class HuggingFaceSource:
    """The rows of a `datasets.Dataset`; see `huggingface`."""

    chunk_rows: tuple[int, ...] | None = None
    runs_user_code = decodes = False

    def __init__(self, dataset: Any) -> None:
        names, self.left_out = _numeric("huggingface()", dataset.features.arrow_schema, dataset.format["columns"])
        self._dataset, self.num_rows = dataset.select_columns(names).with_format("arrow"), len(dataset)
        if not self.num_rows:
            raise DataError("huggingface()", "0 rows", "the dataset must not be empty", "check what was loaded")
        self._kinds = _kinds("huggingface()", self._dataset[[0]], names)

    @property
    def columns(self) -> Sequence[str]:
        return tuple(self._kinds)

    def take(self, row_ids: NDArray[np.int64], seed: Seed = (0, 0)) -> Columns:
        """The rows with these ids, in this order.

        Raises:
            DataError: a column has nulls, or rows of another shape than row 0.
        """
        if not len(row_ids):
            return empty_columns(self._kinds, 0)
        columns = _decoded("huggingface()", self._dataset[row_ids], self._kinds, row_ids)
        return {name: values if values.flags.writeable else values.copy() for name, values in columns.items()}

    def fingerprint(self) -> dict[str, Any]:
        """Number of rows, dtypes and shapes, and the fingerprint that the library keeps of contents and transformations."""
        facts = {"kind": "Hugging Face dataset", "rows": self.num_rows, "fingerprint": self._dataset._fingerprint}
        return facts | _described(self._kinds)


def ray(dataset: Any) -> RayDatasetSource:
    """A source over a Ray Dataset.

    It is computed here, once, and kept in Ray's object store, which spills what does not fit to disk. For data of many
    gigabytes, write them to Parquet and use `raytrain.parquet`.

    Args:
        dataset: a `ray.data.Dataset`. To go on with a run later, it has to have the same rows in the same order then.

    Raises:
        DataError: it is no Ray Dataset, it is empty, or no column can become a tensor.
    """
    import ray as ray_core

    if not is_a(dataset, "ray.data.Dataset"):
        raise misfit("ray()", dataset)
    dataset.context.execution_options.preserve_order = True
    blocks = dataset.materialize().to_arrow_refs()
    describe = ray_core.remote(_block_facts).options(num_cpus=0)
    facts = ray_core.get([describe.remote(block) for block in blocks])
    full = [i for i, (rows, _, _) in enumerate(facts) if rows]
    if not full:
        raise DataError("ray()", "0 rows", "the dataset must not be empty", "check what was loaded")
    first = ray_core.get(blocks[full[0]]).slice(0, 1)
    names, left_out = _numeric("ray()", first.schema, first.schema.names)
    kinds = _kinds("Ray Dataset", first, names)
    return RayDatasetSource([blocks[i] for i in full], [facts[i] for i in full], kinds, left_out)


def huggingface(dataset: Any) -> HuggingFaceSource:
    """A source over a dataset of Hugging Face, as `load_dataset(..., split="train")` returns it.

    Its files have to be where all nodes can read them: workers memory-map them.

    Args:
        dataset: a `datasets.Dataset` with columns of numbers, or of lists of one length; pad text with the tokenizer.

    Raises:
        DataError: it is no such dataset, has splits or a transform of its own, is empty, or no column can become a tensor.
    """
    if is_a(dataset, "datasets.DatasetDict"):
        rule, fix = "is one split", f"write raytrain.huggingface(dataset[{next(iter(dataset), 'train')!r}])"
        raise DataError("huggingface()", "splits " + ", ".join(dataset), rule, fix)
    if not is_a(dataset, "datasets.Dataset"):
        raise misfit("huggingface()", dataset)
    if dataset.format["type"] == "custom":
        rule = "its rows are Arrow's, but this dataset makes them by a function (set_transform)"
        raise DataError("huggingface()", "a transform", rule, "write raytrain.dataset(dataset)")
    return HuggingFaceSource(dataset)


def _block_facts(table: pa.Table) -> tuple[int, int, str]:
    """Rows, bytes and a digest of a block; runs where the block is."""
    return table.num_rows, table.nbytes, digest_of(table)


def _numeric(where: str, schema: pa.Schema, names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The columns that become tensors, and for each other one its type. Raises DataError if there are none."""
    types = {str(name): schema.field(name).type for name in names}
    left_out = {name: f"type {kind}" for name, kind in types.items() if dtype_of(kind) is None}
    if len(left_out) == len(types):
        found = ", ".join(f"{name} ({reason})" for name, reason in left_out.items()) or "no columns"
        raise DataError(where, found, "at least one column can become a tensor", "add a column of numbers")
    return [name for name in types if name not in left_out], left_out


def _kinds(where: str, row: pa.Table, names: Sequence[str]) -> Kinds:
    """Dtype and row shape of columns, from one row."""
    columns = {name: _array(where, row, name, [0]) for name in names}
    return {name: (values.dtype, values.shape[1:]) for name, values in columns.items()}


def _decoded(where: str, table: pa.Table, kinds: Kinds, rows: Sequence[int] | NDArray[np.int64]) -> Columns:
    """All rows of a table. Raises DataError for rows of another type or shape.

    Args:
        rows: their numbers, for errors.
    """
    columns = {}
    for name, (dtype, shape) in kinds.items():
        values = columns[name] = _array(where, table, name, rows)
        if (values.dtype, values.shape[1:]) != (dtype, shape):
            found, rule = f"{values.dtype} {list(values.shape[1:])}", f"all rows are like the first: {dtype} {list(shape)}"
            raise DataError(f"{where}, row {rows[0]}, column {name!r}", found, rule, PAD_OR_CUT)
    return columns


def _array(where: str, table: pa.Table, name: str, rows: Sequence[int] | NDArray[np.int64]) -> NDArray[Any]:
    try:
        return decode(whole(table.column(name)))
    except Unfit as unfit:
        where = f"{where}, row {rows[unfit.row]}, column {name!r}"
        raise DataError(where, unfit.found, *unfit.remedy) from None


def _described(kinds: Kinds) -> dict[str, str]:
    return {f"column {name}": f"{dtype} {list(shape)}" for name, (dtype, shape) in kinds.items()}
