"""What `exactness.py` trains: three small models with dropout, on made data; the convolutional one has BatchNorm, too.

Their settings are such that training does not magnify differences: a small learning rate, plain momentum (Adam divides by
the size of a gradient, also where that is all rounding), no bias where its gradient is zero but for rounding (before
BatchNorm, and in the keys of attention). Runs in the training processes. Knows nothing of workers, modes or faults.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import raytrain

KINDS = ("mlp", "conv", "transformer")
ROWS, GLOBAL_BATCH, NUM_LOGICAL = 2048, 32, 4
FEATURES, CLASSES = 256, 10
CHANNELS, SIDE = 3, 12
TOKENS, LENGTH = 64, 32
DROPOUT = 0.1
LEARNING_RATES = {"mlp": 0.005, "conv": 0.005, "transformer": 0.02}


class Exact(raytrain.Task):
    """One of three small models."""

    kind: Literal["mlp", "conv", "transformer"]
    """Which one."""
    pace: str = ""
    """A file that holds the seconds for which each pass sleeps, so that there is time to change workers."""

    def data(self):
        return {"train": raytrain.arrays(**make_columns(self.kind))}

    def model(self):
        return {"mlp": build_mlp, "conv": build_conv, "transformer": Transformer}[self.kind]()

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATES[self.kind], momentum=0.9)

    def loss(self, model, batch):
        with contextlib.suppress(FileNotFoundError, ValueError):  # it is replaced, and goes in the end
            if self.pace:
                time.sleep(float(Path(self.pace).read_text()))
        if self.kind != "transformer":
            return F.cross_entropy(model(batch["features"]), batch["label"], reduction="none")
        tokens = batch["tokens"]  # [rows, LENGTH + 1]
        logits = model(tokens[:, :-1])  # [rows, LENGTH, TOKENS]
        return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def make_columns(kind: str) -> dict[str, np.ndarray]:
    """Random features with a label that can be learned from them, or sequences whose next token follows a noisy rule."""
    generator = np.random.default_rng(0)
    if kind == "transformer":
        steps = generator.integers(1, 4, (ROWS, LENGTH + 1))
        return {"tokens": np.cumsum(steps, axis=1) % TOKENS}
    shape = (FEATURES,) if kind == "mlp" else (CHANNELS, SIDE, SIDE)
    features = generator.standard_normal((ROWS, *shape), dtype=np.float32)
    flat = features.reshape(ROWS, -1)
    label = (flat @ generator.standard_normal((flat.shape[1], CLASSES), dtype=np.float32)).argmax(1)
    return {"features": features, "label": label.astype(np.int64)}


def build_mlp() -> nn.Module:
    """0.4 million weights."""
    width = 512
    hidden = [nn.Linear(FEATURES, width), nn.GELU(), nn.Dropout(DROPOUT), nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*hidden, nn.Dropout(DROPOUT), nn.Linear(width, CLASSES))


def build_conv() -> nn.Module:
    """24 thousand weights; [rows, CHANNELS, SIDE, SIDE] -> [rows, CLASSES]."""
    widths = (CHANNELS, 16, 32, 64)
    layers = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(DROPOUT), nn.Linear(256, CLASSES))


class Transformer(nn.Module):
    """Pre-norm decoder with learned positions; 0.4 million weights."""

    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(TOKENS, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) * 0.1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.out = nn.Linear(width, TOKENS)

    def forward(self, tokens):
        """[rows, LENGTH] -> logits [rows, LENGTH, TOKENS]."""
        return self.out(self.norm(self.blocks(self.token(tokens) + self.position)))


class Block(nn.Module):
    """Attention to the tokens before, then a feed-forward layer; both add to what came in."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden):
        rows, length, width = hidden.shape
        parts = self.query_key_value(self.norm1(hidden)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [rows, heads, length, width per head]
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.out(seen.transpose(1, 2).reshape(rows, length, width)))
        return hidden + self.dropout(self.feed_forward(self.norm2(hidden)))
