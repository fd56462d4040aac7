"""What both sides of a benchmark train: the same model, the same data, and the same clock.

The clock is a learning rate scheduler, since every training loop has one, steps it once after each optimizer step, and
restores it with its checkpoint: it appends a line per finished step to a file of its process. Nothing here imports
raytrain or Ray, so that neither side pays for the other. Runs in the training processes; `read_steps` in the benchmark's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROWS, FEATURES, CLASSES = 8192, 256, 10
GLOBAL_BATCH, NUM_LOGICAL = 128, 2
LEARNING_RATE, MOMENTUM = 0.02, 0.9
CHECKPOINT_EVERY = 10
WIDTH = 768


@dataclass(frozen=True)
class StepLine:
    """A finished step as one process saw it; `finished` in Unix seconds."""

    step: int
    finished: float
    rank: int
    pid: int


def make_columns():
    """Random features with a label that can be learned from them: [ROWS, FEATURES] float32 and [ROWS] int64."""
    generator = np.random.default_rng(0)
    features = generator.standard_normal((ROWS, FEATURES), dtype=np.float32)
    label = (features @ generator.standard_normal((FEATURES, CLASSES), dtype=np.float32)).argmax(1)
    return {"features": features, "label": label.astype(np.int64)}


def build_model(width: int = WIDTH, depth: int = 3):
    """A multilayer perceptron; by default 1.4 million weights, 10 to 30 ms a step for 64 rows on one core."""
    from torch import nn

    sizes = [FEATURES, *[width] * depth]
    hidden = [layer for i in range(depth) for layer in (nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


def build_optimizer(model):
    import torch

    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def build_clock(optimizer, directory: str):
    """A scheduler that leaves the learning rate alone and writes down when each step was finished.

    Args:
        directory: gets one file per process, `<pid>.steps`.
    """
    import torch
    import torch.distributed as dist

    class Clock(torch.optim.lr_scheduler.LRScheduler):
        def get_lr(self):
            return [group["lr"] for group in self.optimizer.param_groups]

        def step(self, epoch=None):
            super().step(epoch)
            if self.last_epoch:  # 0 is the call in the constructor
                rank = dist.get_rank() if dist.is_initialized() else 0
                _write(directory, f"{self.last_epoch - 1} {time.time():.6f} {rank} {os.getpid()}\n")

    return Clock(optimizer)


def read_steps(directory: str | Path) -> list[StepLine]:
    """All lines of all processes so far, in the order of time; a line that is still being written is left out."""
    lines = []
    for path in Path(directory).glob("*.steps"):
        whole = path.read_text().rpartition("\n")[0]
        for step, finished, rank, pid in (line.split() for line in whole.splitlines()):
            lines.append(StepLine(int(step), float(finished), int(rank), int(pid)))
    return sorted(lines, key=lambda line: line.finished)


def times_done_again(lines: list[StepLine]) -> int:
    """How many steps were done more than they had to be, counted by the lines of rank 0."""
    steps = [line.step for line in lines if line.rank == 0]
    return len(steps) - len(set(steps))


def longest_standstill(lines: list[StepLine]) -> float:
    """The longest time, in seconds, without a step that nobody had finished before."""
    times, height = [], -1
    for line in lines:
        if line.step > height:
            height = line.step
            times.append(line.finished)
    return float(np.max(np.diff(times)))


def median_of(values: list[float]) -> float:
    return float(np.median(values))


def show_table(title: str, header: list[str], rows: list[list[str]], out: Callable[[str], None] = print) -> None:
    """Writes a table with columns as wide as their widest cell."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    out(title)
    for first, *rest in [header, ["-" * width for width in widths], *rows]:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        out("  ".join(cells))


def _write(directory: str, line: str) -> None:
    with open(os.path.join(directory, f"{os.getpid()}.steps"), "a") as file:
        file.write(line)
