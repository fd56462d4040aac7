"""A sweep as a value: what viewers show of it, and what `sweep.json` keeps. Plain values only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PENDING, RUNNING, PAUSED, COMPLETED, STOPPED, FAILED = "pending", "running", "paused", "completed", "stopped", "failed"
"""States of a trial; the sweep's scheduler ends a stopped trial early."""


@dataclass(frozen=True, kw_only=True)
class TrialView:
    """One trial.

    Args:
        name: of its directory below the sweep's.
        state: one of the states above.
        values: its hyperparameters, by name; settings of the run as "run.global_batch".
        workers: number of workers now.
        step, num_steps: finished steps, and steps of the whole run; 0 if not known yet.
        curve: (finished steps, value of the sweep's metric), in the order of steps.
        message: of the error, for a failed trial.
    """

    name: str
    state: str = PENDING
    values: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 0
    step: int = 0
    num_steps: int = 0
    curve: tuple[tuple[int, float], ...] = ()
    message: str = ""

    @property
    def newest(self) -> float | None:
        """The newest value of the metric."""
        return self.curve[-1][1] if self.curve else None

    def best(self, mode: str) -> tuple[int, float] | None:
        """(finished steps, value) of the best value so far, the first one in a tie; None if no value is finite."""
        finite = [point for point in self.curve if math.isfinite(point[1])]
        sign = 1.0 if mode == "min" else -1.0
        return min(finite, key=lambda point: sign * point[1]) if finite else None


@dataclass(frozen=True, kw_only=True)
class SweepView:
    """All trials of a sweep.

    Args:
        name, directory: of the sweep.
        metric: by which trials are compared; mode: "min" or "max".
        num_trials: of the whole sweep.
        trials: those that Ray Tune has created, in order.
        started: Unix time in seconds at which this driver started.
        outcome: "completed" or "stopped", "" while it goes on.
    """

    name: str
    directory: str
    metric: str
    mode: str
    num_trials: int
    trials: tuple[TrialView, ...] = ()
    started: float = 0.0
    outcome: str = ""

    @property
    def best(self) -> TrialView | None:
        """The trial with the best value over its whole history, the first one in a tie; None before there is a value."""
        sign = 1.0 if self.mode == "min" else -1.0
        having = [(trial, point) for trial in self.trials if (point := trial.best(self.mode)) is not None]
        return min(having, key=lambda pair: sign * pair[1][1])[0] if having else None
