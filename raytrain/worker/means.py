"""Is a scalar that `loss` or `metrics` returned the mean over the rows of a micro-batch? Only then may it be averaged.

One number does not tell, so the value over some rows is compared with the mean of the values over parts of them. That finds
F1 scores, perplexities, counts and maxima, and averages over tokens where rows have unequal numbers of them. Runs in the
worker's training thread, in evaluation mode.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from raytrain.data.loader import Batch
from raytrain.errors import ConfigError, TaskError
from raytrain.worker.hooks import seed_everything
from raytrain.worker.metrics import Mean, Tallies, scalars_in
from raytrain.worker.scoring import LOSS, Scorer, copied

TOLERANCE, TOLERANCE_BF16 = 1e-4, 1e-2
"""How far apart value and mean may be because of rounding, relative to the largest value of a part; the second one if the
parts run through the model once more in bfloat16."""
MAX_PARTS = 8
MIN_PART_ROWS = 2
"""Some hooks do not work for a single row, and need not."""
MIN_ROWS, FEW_ROWS = 2 * MIN_PART_ROWS, 8
"""A check is possible; fewer rows tell little."""
NUM_DRAWS = 16
"""Comparisons of values that depend on random numbers."""
MAX_DEVIATIONS = 6.0
"""How far the mean of their differences may be from zero, in its own standard errors."""


def check_means(scorer: Scorer, columns: Batch, num_rows: int, with_metrics: bool = True) -> None:
    """Checks that each scalar is the mean over the rows, up to rounding. Needs MIN_ROWS rows, and does nothing for fewer.

    For a part, the model's output is that for all rows, cut to the rows of the part, where it can be. So only what the hooks
    make of the output is judged; a model whose output for a row depends on the other rows changes nothing.

    Raises:
        ConfigError: a scalar is not a mean.
        TaskError: a hook raised for all the rows.
    """
    if num_rows >= MIN_ROWS:
        with _without_compiling():
            _Check(scorer, columns, num_rows, with_metrics).run()


class FirstRows:
    """The first rows of an evaluation, collected until they are enough to check scalars on."""

    def __init__(self) -> None:
        self._parts: list[Batch] = []
        self._num_rows = 0
        self.is_complete = False

    def add(self, scorer: Scorer, columns: Batch, num_rows: int) -> None:
        """Adds the rows of a micro-batch, whose hooks returned scalars; checks them once. Raises ConfigError."""
        self._parts.append(columns)
        self._num_rows += num_rows
        self.is_complete = self._num_rows >= FEW_ROWS
        if not self.is_complete:
            return
        names, parts = self._parts[0], self._parts
        with contextlib.suppress(TaskError, RuntimeError):  # they may not fit together, or in memory at once
            rows = {name: torch.cat([part[name] for part in parts]) for name in names}
            check_means(scorer, Batch(rows, columns.left_out), self._num_rows)
        self._parts = []


class _Check:
    """One check; see `check_means`."""

    def __init__(self, scorer: Scorer, columns: Batch, num_rows: int, with_metrics: bool) -> None:
        self._scorer, self._columns, self._num_rows, self._with_metrics = scorer, columns, num_rows, with_metrics
        num_parts = min(MAX_PARTS, num_rows // MIN_PART_ROWS)
        cuts = [num_rows * part // num_parts for part in range(num_parts + 1)]
        self._parts = [slice(start, end) for start, end in pairwise(cuts)]
        self._outputs = _Outputs(num_rows)

    def run(self) -> None:
        handle = self._scorer.model.register_forward_hook(self._outputs)
        try:
            whole = self._values(slice(0, self._num_rows), 0)
            after = _random_state()
            seed_everything(0, 0)
            is_random = after != _random_state()
            names = list(scalars_in(whole))
            if not names:
                return
            self._outputs.play_back(not (is_random or self._scorer.needs_gradients))
            pairs = [(whole, self._values_of_parts(names, 0))]
            for draw in range(1, NUM_DRAWS if is_random else 1):
                pairs.append((self._values(slice(0, self._num_rows), draw), self._values_of_parts(names, draw)))
        finally:
            handle.remove()
        is_rerun = self._scorer.precision == "bf16" and not self._outputs.are_played_back
        for name in names:
            compared = [
                (scalars_in(first)[name], [scalars_in(part)[name] for part in parts if name in part])
                for first, parts in pairs
            ]
            if reason := _reason(compared, TOLERANCE_BF16 if is_rerun else TOLERANCE):
                raise self._error(name, f"{reason} of the same {self._num_rows} rows")

    def _values(self, rows: slice, draw: int) -> Tallies:
        num_rows = rows.stop - rows.start
        self._outputs.rows = rows
        seed = (draw, rows.start if num_rows < self._num_rows else 0)
        return self._scorer(copied(self._columns, rows), num_rows, seed, self._with_metrics)

    def _values_of_parts(self, names: list[str], draw: int) -> list[Tallies]:
        try:
            return [self._values(rows, draw) for rows in self._parts]
        except TaskError as error:
            is_loss = error.where.startswith(LOSS) or names == [LOSS]
            cause = error.traceback.strip().splitlines()[-1]
            name = LOSS if is_loss else next(name for name in names if name != LOSS)
            raise self._error(name, f"a scalar for {self._num_rows} rows, but none for a part of them: {cause}") from None

    def _error(self, name: str, found: str) -> ConfigError:
        where, rule = type(self._scorer.task).__name__, "a scalar is the mean over the rows of a micro-batch"
        if name == LOSS:
            rule += "; a sum over tokens or pairs has its own weight"
            fix = "return one value per row (reduction='none'), or raytrain.Loss(sum, weight)"
            return ConfigError(f"{where}.loss", found, rule, fix)
        rule += ", whose mean over micro-batches is that over all rows"
        fix = (
            "return one value per row, raytrain.Loss(sum, weight), a torchmetrics object, or raytrain.Sum(value) and a hook "
            "`summarise` that computes the metric from the sums"
        )
        return ConfigError(f"{where}.metrics, {name}", found, rule, fix)


class _Outputs:
    """A forward hook that keeps the outputs of the model's calls, and gives their rows to later calls for a part.

    Args:
        num_rows: rows of the batch that comes first.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows, self._kept = num_rows, list[Any]()
        self._is_playing_back, self.are_played_back = False, False
        """Whether kept outputs are given; whether that was possible for all outputs."""
        self._rows, self._num_calls = slice(0, num_rows), 0

    def play_back(self, is_possible: bool) -> None:
        """The outputs for all rows are there; calls for parts follow."""
        self._is_playing_back = self.are_played_back = is_possible and bool(self._kept)

    @property
    def rows(self) -> slice:
        """The rows that the next calls of the model are for."""
        return self._rows

    @rows.setter
    def rows(self, rows: slice) -> None:
        self._rows, self._num_calls = rows, 0

    def __call__(self, model: torch.nn.Module, args: Any, output: Any) -> Any:
        number, self._num_calls = self._num_calls, self._num_calls + 1
        if not self._is_playing_back:
            self._kept.append(tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, output))
            return None
        try:
            return tree_map(self._rows_of, output, self._kept[number])
        except (IndexError, ValueError):  # the calls for a part are others
            self.are_played_back = False
            return None

    def _rows_of(self, here: Any, kept: Any) -> Any:
        num_rows = self._rows.stop - self._rows.start
        has_rows = isinstance(here, torch.Tensor) and here.ndim and isinstance(kept, torch.Tensor)
        if has_rows and (len(here), here.shape[1:]) == (num_rows, kept.shape[1:]) and len(kept) == self._num_rows:
            return kept[self._rows].clone()
        self.are_played_back &= not isinstance(here, torch.Tensor)
        return here


def _reason(compared: list[tuple[Mean, list[Mean]]], tolerance: float) -> str:
    """How values and the means over their parts differ; empty if it may be rounding, or chance."""
    values = [value.value for value, _ in compared]
    means = [sum(part.sum for part in parts) / (sum(part.weight for part in parts) or math.nan) for _, parts in compared]
    if not all(map(math.isfinite, values)):
        return ""
    differences = [value - mean for value, mean in zip(values, means, strict=True)]
    allowed = 0.0
    if all(map(math.isfinite, differences)):
        eps = max(value.scalar_eps or 0.0 for value, _ in compared)
        allowed = max(tolerance, 2 * eps) * max(abs(part.value) for _, parts in compared for part in parts)
        if len(differences) > 1:
            allowed += MAX_DEVIATIONS * statistics.stdev(differences) / math.sqrt(len(differences))
    if abs(statistics.fmean(differences)) <= allowed:
        return ""
    return f"{statistics.fmean(values):.6g}, but {statistics.fmean(means):.6g} as the mean over {len(compared[0][1])} parts"


def _random_state() -> tuple[object, ...]:
    """What changes when something draws random numbers."""
    _, keys, *position = np.random.get_state()
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]
    return (*(state.numpy().tobytes() for state in states), np.asarray(keys).tobytes(), *position, random.getstate())


@contextlib.contextmanager
def _without_compiling() -> Iterator[None]:
    """Compiled modules run eagerly: other numbers of rows would be compiled anew."""
    is_used = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if is_used else contextlib.nullcontext():
        yield
