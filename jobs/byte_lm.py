"""A small causal transformer that learns to predict the next byte of Python programs.

The text is the standard library of the Python that runs this job, so nothing is downloaded. Before the first run Ray Data
writes it to Parquet, as rows of consecutive bytes; later runs find it there. Shows: a loss that is a sum over tokens, a
learning rate schedule, clipping, data in Parquet. Bits per byte fall from 8 to about 2.8 in two minutes on two CPUs.

    python jobs/byte_lm.py
    python jobs/byte_lm.py --width 256 --layers 6 --run.steps 20000 --run.precision bf16 --run.name large
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

import pyarrow as pa
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

import raytrain

NUM_BYTES = 256
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
TRAIN_FILES, ROW_GROUP_ROWS = 8, 512
VALID_EVERY = 40  # of the sources: every 40th file is never trained on


class ByteLM(raytrain.Task):
    """Predicts the next byte of Python sources."""

    width: int = Field(default=96, gt=0)
    """Width of the model; a multiple of `heads`."""
    layers: int = Field(default=2, gt=0)
    """Transformer blocks."""
    heads: int = Field(default=4, gt=0)
    """Attention heads of each block."""
    context: int = Field(default=128, gt=0)
    """Bytes that the model sees at once."""
    lr: float = Field(4e-3, gt=0)
    """Highest learning rate; reached after a twentieth of the steps, falling to a tenth of it along a cosine."""
    megabytes: float = Field(default=4.0, gt=0)
    """How much of the standard library to use."""
    cache: str = "./runs/byte-lm-data"
    """Directory for the Parquet files; all nodes of a cluster must share it."""

    def data(self):
        directory = self.directory()
        if not directory.exists():
            write_corpus(directory, self.megabytes, self.context)
        return {name: raytrain.parquet(directory / name) for name in ("train", "valid")}

    def directory(self) -> Path:
        """Where the Parquet files are; differs where their content differs."""
        name = f"python{sysconfig.get_python_version()}-{self.megabytes:g}MB-context{self.context}"
        return Path(self.cache).expanduser().absolute() / name

    def model(self):
        return Transformer(self.width, self.layers, self.heads, self.context)

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1)

    def scheduler(self, optimizer, num_steps):
        warm_up = max(1, num_steps // 20)

        def factor(step: int) -> float:
            if step < warm_up:
                return (step + 1) / warm_up
            return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, num_steps - warm_up))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def loss(self, model, batch):
        tokens = batch["bytes"].long()  # [rows, context + 1]
        logits = model(tokens[:, :-1])  # [rows, context, 256]
        targets = tokens[:, 1:].flatten()
        return raytrain.Loss(F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), targets.numel())

    def metrics(self, model, batch):
        nats, num_tokens = self.loss(model, batch)
        return {"bits_per_byte": raytrain.Loss(nats / math.log(2), num_tokens)}


class Transformer(nn.Module):
    """Pre-norm decoder over bytes with learned positions; the embedding is also the last layer."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens):
        """[rows, length] -> logits [rows, length, 256]."""
        hidden = self.token(tokens) + self.position[: tokens.shape[1]]
        return self.norm(self.blocks(hidden)) @ self.token.weight.T


class Block(nn.Module):
    """Attention to the bytes before, then a feed-forward layer; both add to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden):
        rows, length, width = hidden.shape
        parts = self.query_key_value(self.norm1(hidden)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [rows, heads, length, width per head]
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return hidden + self.feed_forward(self.norm2(hidden))


def write_corpus(directory: Path, megabytes: float, context: int) -> None:
    """Writes the Parquet files of both splits; the directory appears when it is complete, or not at all.

    `data` is called before raytrain connects to Ray, so that mistakes are reported at once; so this connects by itself.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        unfinished.chmod(0o755)
        sources = read_sources(int(megabytes * 1e6))
        with raytrain.connected():
            held_out = sources[::VALID_EVERY]
            write_split(unfinished / "valid", b"".join(held_out), context, num_files=1)
            trained = [text for number, text in enumerate(sources) if number % VALID_EVERY]
            write_split(unfinished / "train", b"".join(trained), context, TRAIN_FILES)
        unfinished.rename(directory)
    except OSError:
        if not directory.exists():  # else another job wrote the same meanwhile
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def read_sources(limit_bytes: int) -> list[bytes]:
    """The standard library's *.py files without tests, in the order of their names, until the limit is reached."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    sources, total = [], 0
    for path in paths:
        if LEFT_OUT.isdisjoint(path.parts) and total < limit_bytes:
            sources.append((root / path).read_bytes()[: limit_bytes - total])
            total += len(sources[-1])
    return sources


def write_split(directory: Path, text: bytes, context: int, num_files: int) -> None:
    """Lets Ray Data cut the text in rows of context + 1 bytes and write them, one file per part of the text.

    A row's last byte is the first one of the next row, so that each byte but the first is predicted once.
    """
    import ray.data
    from ray.data import SaveMode
    from ray.data.datasource import FilenameProvider

    class NumberedFiles(FilenameProvider):
        """Names that are the same each time, since a run is resumed only with the same files."""

        def get_filename_for_task(self, write_uuid, task_index):
            return f"part-{task_index:03}.parquet"

    rows_per_file = max(1, math.ceil((len(text) - 1) / context / num_files))
    starts = range(0, len(text) - context, rows_per_file * context)
    parts = [{"text": text[start : start + rows_per_file * context + 1]} for start in starts]
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    rows = ray.data.from_items(parts, override_num_blocks=len(parts)).map_batches(
        cut_rows, batch_size=1, batch_format="pyarrow", fn_kwargs={"context": context}
    )
    rows.write_parquet(
        os.fspath(directory),
        mode=SaveMode.OVERWRITE,
        filename_provider=NumberedFiles(),
        row_group_size=ROW_GROUP_ROWS,
    )


def cut_rows(part: pa.Table, context: int) -> pa.Table:
    """A part of the text, one binary value, as rows of context + 1 bytes; runs in Ray Data's processes."""
    text = torch.frombuffer(bytearray(part.column("text")[0].as_py()), dtype=torch.uint8)
    rows = text.unfold(0, context + 1, context).contiguous().numpy()  # [rows, context + 1]
    return pa.table({"bytes": pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), context + 1)})


if __name__ == "__main__":
    raytrain.main(
        ByteLM,
        steps=500,
        global_batch=32,
        workers=(1, 2),
        clip_norm=1.0,
        eval_every=125,
        checkpoint_every=125,
        best="min:valid/bits_per_byte",
    )
