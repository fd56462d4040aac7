"""The settings of a sweep: how many trials, how they are chosen and stopped, and which workers they share.

Validated in the same way from Python and from the command line. A trial's own settings are in `RunConfig`: its `workers`
are those of one trial, its `name` and `storage` those of the sweep.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from raytrain.config import Invalid, Settings, WorkerRange, with_fields_in_help


@with_fields_in_help
class SweepConfig(Settings):
    """How to run a sweep: number of trials, metric, scheduler, search algorithm, shared workers."""

    _prefix: ClassVar[str] = "sweep."

    trials: int = Field(default=10, gt=0)
    """Number of trials; with a grid, the number of trials per grid point."""
    metric: str = ""
    """Metric to compare trials by, such as valid/accuracy. Default: that of run.best."""
    mode: Literal["", "min", "max"] = ""
    """Whether a smaller or a larger metric is better. Default: that of run.best."""
    scheduler: Literal["fifo", "asha", "hyperband", "median"] = "asha"
    """Which trials continue: fifo (all), asha and hyperband (the best of each rung), median (those above the median)."""
    search: Literal["random", "optuna"] = "random"
    """How to choose the values of the next trial."""
    workers: WorkerRange | None = None
    """Workers of all trials together: a number, or a range min:max. Default: as many as the cluster can hold."""
    concurrent: int | None = Field(default=None, gt=0)
    """Maximum number of concurrent trials. Default: as many as fit, each with its smallest number of workers."""
    policy: Literal["fair", "best"] = "fair"
    """Which trials get spare workers: fair: those with the fewest workers; best: those with the best metric."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the search."""

    @field_validator("workers")
    @classmethod
    def _workers_are_a_range(cls, workers: tuple[int, int] | None) -> tuple[int, int] | None:
        if workers and not 1 <= workers[0] <= workers[1]:
            raise Invalid("at least 1 worker, the smallest number first", "give a number such as 4, or a range such as 1:8")
        return workers
