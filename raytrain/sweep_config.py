"""The settings of a sweep: how many trials, how they are chosen and stopped, and which workers they share.

Validated the same way from Python and from the command line. What a trial is, is in `RunConfig`: its `workers` are those
of one trial, its `name` and `storage` those of the sweep.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from raytrain.config import Invalid, WorkerRange, explain


class SweepConfig(BaseModel):
    """How a sweep is run."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    trials: int = Field(10, gt=0)
    """Trials in all; of each point of a grid, so many."""
    metric: str = ""
    """What is best: a metric such as valid/accuracy. Default: that of run.best."""
    mode: Literal["", "min", "max"] = ""
    """Whether the smallest or the largest metric is best. Default: that of run.best."""
    scheduler: Literal["fifo", "asha", "hyperband", "median"] = "asha"
    """Which trials go on: fifo (all), asha and hyperband (the best of each rung), median (those above the median)."""
    search: Literal["random", "optuna"] = "random"
    """How the values of the next trial are chosen."""
    workers: WorkerRange | None = None
    """Workers of all trials together: a number, or a range min:max. Default: all that the cluster has room for."""
    concurrent: int | None = Field(None, gt=0)
    """Most trials at a time. Default: as many as there is room for, each with its smallest number of workers."""
    policy: Literal["fair", "best"] = "fair"
    """Who gets the workers that are left: fair: who has the fewest; best: the trials that are ranked highest."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the choice of values."""

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise explain(error, type(self), prefix="sweep.") from None

    @field_validator("workers")
    @classmethod
    def _workers_are_a_range(cls, workers: tuple[int, int] | None) -> tuple[int, int] | None:
        if workers and not 1 <= workers[0] <= workers[1]:
            raise Invalid("at least 1 worker, the smallest number first", "give a number such as 4, or a range such as 1:8")
        return workers
