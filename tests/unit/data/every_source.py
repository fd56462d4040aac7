"""One small source of each kind, of rows that tell their number, for tests that all of them must pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from raytrain.data.converted import converting_to
from raytrain.data.drawn import mix, weighted
from raytrain.data.image_source import images
from raytrain.data.in_memory import arrays, dataset
from raytrain.data.line_files import csv
from raytrain.data.numpy_files import numpy
from raytrain.data.packed_text import text
from raytrain.data.parquet import parquet
from raytrain.data.source import Source
from raytrain.data.tables import huggingface

NUM_ROWS = 90
IDS = np.arange(NUM_ROWS)


class Augmented:
    """A map-style dataset whose rows draw random numbers."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"id": row, "noise": torch.rand(2)}


def parquet_files(directory: Path) -> Source:
    for file, ids in enumerate(np.array_split(IDS, 3)):
        pq.write_table(pa.table({"id": ids, "x": ids / 2}), directory / f"{file}.parquet", row_group_size=11)
    return parquet(directory)


def ragged_files(directory: Path) -> Source:
    table = pa.table({"id": IDS, "tokens": [list(range(row % 4)) for row in IDS.tolist()]})
    pq.write_table(table, directory / "ragged.parquet", row_group_size=20)
    return parquet(directory, pad={"tokens": -1})


def numpy_files(directory: Path) -> Source:
    np.save(directory / "id.npy", IDS)
    for row in IDS.tolist():
        np.save(directory / f"row{row:03}.npy", np.full((2, 3), row, np.float32))
    return numpy(id=directory / "id.npy", map=str(directory / "row*.npy"))


def image_files(directory: Path) -> Source:
    for row in IDS.tolist():
        (directory / str(row % 3)).mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 5), row, np.uint8)).save(directory / str(row % 3) / f"{row:03}.png")
    return images(directory, mode="L")


def csv_files(directory: Path) -> Source:
    (directory / "rows.csv").write_text("id,x\n" + "".join(f"{row},{row / 2}\n" for row in IDS.tolist()))
    with converting_to(str(directory), lambda text: None):
        return csv(directory / "rows.csv")


def packed_texts(directory: Path) -> Source:
    (directory / "text.txt").write_text("".join(f"{row:03}" for row in IDS.tolist()))
    with converting_to(str(directory), lambda text: None):
        return text(directory, length=3)


SOURCES: dict[str, Callable[[Path], Source]] = {
    "arrays": lambda directory: arrays(id=IDS, x=IDS[:, None] / 2),
    "dataset": lambda directory: dataset(Augmented()),
    "parquet": parquet_files,
    "padded parquet": ragged_files,
    "csv": csv_files,
    "text": packed_texts,
    "numpy": numpy_files,
    "images": image_files,
    "Hugging Face": lambda directory: huggingface(datasets.Dataset.from_dict({"id": IDS, "x": IDS / 2})),
    "mix": lambda directory: mix([(parquet_files(directory), 2), (arrays(id=IDS[:7], x=IDS[:7] / 4), 1)]),
    "weighted": lambda directory: weighted(dataset(Augmented()), IDS % 3),
}
