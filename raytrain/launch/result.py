"""How a run ended, for the program that started it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """The outcome of `Trainer.fit`.

    Args:
        name, directory: of the run; the directory as a path or within its filesystem.
        outcome: "completed", "stopped", or "already complete" if there was nothing left to do.
        step: finished optimizer steps.
        metrics: the evaluation of the newest checkpoint, by name; empty if it was not evaluated.
        checkpoint: directory of the newest checkpoint; "" if there is none.
        best_checkpoint: directory of the best checkpoint by `run.best`; "" if there is none.
        stopped_by: number of the signal that stopped the run, or None.
    """

    name: str
    directory: str
    outcome: str
    step: int
    metrics: Mapping[str, float]
    checkpoint: str
    best_checkpoint: str
    stopped_by: int | None = None
