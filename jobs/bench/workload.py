"""What both sides of a benchmark train: the same model, the same data, and the same clock.

The clock is a learning rate scheduler, since every training loop has one, steps it once after each optimizer step, and
restores it with its checkpoint: it appends a line per finished step to a file of its process. Nothing here imports
raytrain or Ray, so that neither side pays for the other. Runs in the training processes; `read_steps` in the benchmark's.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROWS, FEATURES, CLASSES = 8192, 256, 10
GLOBAL_BATCH, NUM_LOGICAL = 128, 2
LEARNING_RATE, MOMENTUM = 0.02, 0.9
CHECKPOINT_EVERY = 10
WIDTH = 768

TRIALS = (0.006, 0.04, 0.002, 0.015, 0.12, 0.001, 0.03, 0.01, 0.08, 0.004, 0.25, 0.02)
"""Learning rates of a sweep's trials, in the order in which they are tried."""
TRIAL_EPOCHS, TRIAL_BATCH, TRIAL_LOGICAL, VALID_ROWS = 9, 256, 4, 1024
REDUCTION = 3
"""After 1, 3 and 9 epochs, only one trial in so many goes on."""
WORKER_CPUS = 0.5
WAIT_PER_ROW_S = 0.0011
TOGETHER_S = 1.0
"""Within this time of a trial's last step its workers have ended with it; who ended before had left it."""


@dataclass(frozen=True)
class StepLine:
    """A finished step as one process saw it; `finished` in Unix seconds."""

    step: int
    finished: float
    rank: int
    pid: int


Lines = dict[str, list[StepLine]]
"""The lines of each trial of a sweep, in the order of time."""


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


def build_optimizer(model, learning_rate: float = LEARNING_RATE):
    import torch

    return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=MOMENTUM)


def make_trial_columns():
    """The columns to train on, and those to evaluate on."""
    columns = make_columns()
    parts = slice(None, -VALID_ROWS), slice(-VALID_ROWS, None)
    return tuple({name: values[part] for name, values in columns.items()} for part in parts)


def build_trial_model():
    """17 thousand weights: its passes take next to no CPU."""
    return build_model(width=64, depth=1)


def wait_for_device(rows: int) -> None:
    """Waits as long as a GPU would take for so many rows: workers on few cores do not slow each other down."""
    time.sleep(rows * WAIT_PER_ROW_S)


def trial_directory(directory: str | Path, learning_rate: float) -> Path:
    """Where the clock of a trial writes."""
    return Path(directory, f"{learning_rate:g}")


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


def trained_worker_s(lines: Lines) -> float:
    """The sum over steps of workers x the median time of a step with so many workers."""
    counts: dict[int, int] = defaultdict(int)
    times = defaultdict(list)
    for some in lines.values():
        workers = defaultdict(set)
        first = {}
        for line in some:
            workers[line.step].add(line.pid)
            first.setdefault(line.step, line.finished)
        for step, pids in workers.items():
            counts[len(pids)] += 1
            if workers.get(step - 1) == pids:
                times[len(pids)].append(first[step] - first[step - 1])
    every = median_of([num * median_of(some) for num, some in times.items()])
    return sum(count * (num * median_of(times[num]) if times[num] else every) for num, count in counts.items())


def handed_on(lines: Lines, stopped: list[str]) -> dict[str, list[float]]:
    """Of each stopped trial, the seconds until somebody trained in the places of its workers.

    Who begins takes the place that has been free for longest.
    """
    spans = defaultdict(list)
    for trial, some in lines.items():
        for line in some:
            spans[trial, line.pid].append(line.finished)
    last = {trial: some[-1].finished for trial, some in lines.items()}
    begins = [(times[0], 1, trial) for (trial, _), times in spans.items()]
    ends = [(times[-1], 0, trial) for (trial, _), times in spans.items()]
    found: dict[str, list[float]] = {trial: [] for trial in stopped}
    free: list[tuple[float, str]] = []
    for moment, is_begin, trial in sorted(begins + ends):
        if not is_begin:
            free.append((moment, trial if last[trial] - moment < TOGETHER_S else ""))
        elif free:
            since, before = free.pop(0)
            if before in found:
                found[before].append(moment - since)
    return found


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
