"""Which rows does `feed.py` read? Numbers and pictures, in Parquet files, and once more in MosaicML streaming's format.

Numbers are 64 columns of float32. Pictures are 6 KB of bytes that some arithmetic decodes to 50 KB, about as costly as a
small JPEG. All rows have a label and an id. The functions that turn what Arrow reads into tensors are for the sides that
are written by hand. Run with a directory, writes its rows in streaming's format: that needs a Python that has it.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

KINDS = ("tabular", "pictures")
FILES, GROUPS = 8, 10
"""Files, and row groups of each of them."""
FEATURES, PICTURE_BYTES = 64, 6144
NAMES = [f"f{i:02}" for i in range(FEATURES)]
WINDOW = 4
"""Row groups within which all sides shuffle."""


@dataclass(frozen=True)
class Case:
    """What a side has to read: the Parquet files of a directory, or the same rows in `mds` below it."""

    kind: str
    directory: str
    num_workers: int
    seconds: float

    @property
    def title(self) -> str:
        return f"{self.kind}, {self.num_workers} worker{'s' * (self.num_workers > 1)}"

    @property
    def files(self) -> list[str]:
        return find_files(self.directory)

    @property
    def window_rows(self) -> int:
        return WINDOW * pq.read_metadata(self.files[0]).row_group(0).num_rows


def find_files(directory: str) -> list[str]:
    return sorted(map(str, Path(directory).glob("*.parquet")))


def make_data(scratch: str, kind: str, num_rows: int, streaming_python: str | None) -> str:
    """Writes the rows unless they are there already, for streaming if there is a Python that has it; returns where."""
    directory = Path(scratch, f"{kind}-{num_rows}")
    if not directory.exists():
        unfinished = Path(f"{directory}.new")
        unfinished.mkdir(parents=True, exist_ok=True)
        rows = num_rows // (FILES * GROUPS) * GROUPS
        for number in range(FILES):
            table = make_table(kind, np.random.default_rng(number), rows, number * rows)
            pq.write_table(table, unfinished / f"{number}.parquet", row_group_size=rows // GROUPS)
        unfinished.rename(directory)
    if streaming_python and not (directory / "mds/index.json").exists():
        subprocess.run([streaming_python, __file__, str(directory)], check=True)
    return str(directory)


def make_table(kind: str, generator: np.random.Generator, rows: int, first: int) -> pa.Table:
    columns = {"label": generator.integers(0, 10, rows), "id": np.arange(first, first + rows)}
    if kind == "tabular":
        return pa.table({name: generator.standard_normal(rows, dtype=np.float32) for name in NAMES} | columns)
    pixels = pa.array(generator.integers(0, 256, rows * PICTURE_BYTES, dtype=np.uint8))
    return pa.table({"pixels": pa.FixedSizeListArray.from_arrays(pixels, PICTURE_BYTES)} | columns)


def decode(pixels: np.ndarray) -> np.ndarray:
    """[rows, PICTURE_BYTES] uint8 -> [rows, 3, 64, 64] float32: a number for each half byte, with a gamma, normalised."""
    halves = np.stack([pixels >> 4, pixels & 15], axis=2).reshape(len(pixels), 3, 64, 64)
    return ((halves.astype(np.float32) / 15) ** 2.2 - 0.5) / 0.25


def decode_columns(columns):
    """As a transform of raytrain, and of Ray Data, which may give lists as an array of arrays."""
    pixels = columns["pixels"]
    pixels = np.stack(list(pixels)) if pixels.dtype == object else pixels
    return {"picture": decode(pixels), "label": columns["label"], "id": columns["id"]}


def to_arrays(table) -> dict[str, np.ndarray]:
    """The columns of a table or batch of Arrow, without a copy where that is possible."""
    arrays = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        arrays[name] = column.flatten().to_numpy().reshape(len(column), -1) if name == "pixels" else column.to_numpy()
    return arrays


def to_rows(table) -> dict[str, np.ndarray]:
    """As `to_arrays`, with all features in one array."""
    arrays = to_arrays(table)
    if "pixels" in arrays:
        return arrays
    return {"features": np.stack([arrays.pop(name) for name in NAMES], axis=1), **arrays}


def to_tensors(arrays):
    """Decoded. Memory of Arrow is copied, since who trains may write to a batch."""
    import torch

    arrays = decode_columns(arrays) if "pixels" in arrays else arrays
    return {name: torch.from_numpy(a if a.flags.writeable else a.copy()) for name, a in arrays.items()}


def convert(directory: str) -> None:
    """Writes the rows of Parquet files in the format of MosaicML streaming."""
    from streaming import MDSWriter

    is_tabular = Path(directory).name.startswith("tabular")
    first = {"features": f"ndarray:float32:{FEATURES}"} if is_tabular else {"pixels": f"ndarray:uint8:{PICTURE_BYTES}"}
    with MDSWriter(out=f"{directory}/mds", columns={**first, "label": "int64", "id": "int64"}) as writer:
        for file in find_files(directory):
            rows = to_rows(pq.read_table(file))
            for i in range(len(rows["label"])):
                writer.write({name: values[i] for name, values in rows.items()})


if __name__ == "__main__":
    convert(sys.argv[1])
