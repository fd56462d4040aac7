"""How a sweep ended, for the program that started it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytrain.checkpoint.retention import best_of
from raytrain.checkpoint.store import CheckpointStore
from raytrain.events.sweep import FAILED, SweepView
from raytrain.rundir import CHECKPOINTS, RunDir

if TYPE_CHECKING:
    import pandas
    from ray.tune import ResultGrid


@dataclass(frozen=True)
class BestTrial:
    """The trial with the best value over its whole history.

    Args:
        name, directory: of its run.
        values: its hyperparameters by name.
        step, value: finished steps, and the sweep's metric there.
        checkpoint: directory of its best checkpoint; "" if there is none.
    """

    name: str
    directory: str
    values: Mapping[str, Any]
    step: int
    value: float
    checkpoint: str


@dataclass(frozen=True)
class SweepResult:
    """The outcome of `Sweep.fit`.

    Args:
        name, directory: of the sweep.
        outcome: "completed", "stopped", or "already complete" if there was nothing left to do.
        best: None if no trial has a value.
        view: all trials.
        grid: Ray Tune's own result.
        stopped_by: number of the signal that stopped the sweep, or None.
    """

    name: str
    directory: str
    outcome: str
    best: BestTrial | None
    view: SweepView
    grid: ResultGrid
    stopped_by: int | None = None

    @property
    def num_failed(self) -> int:
        """Trials that ended with an error."""
        return sum(trial.state == FAILED for trial in self.view.trials)

    @property
    def table(self) -> pandas.DataFrame:
        """One row per trial: its name and state, its hyperparameters, finished steps, the best value of the sweep's metric
        and its step, the newest value, and the directory of its run."""
        import pandas

        return pandas.DataFrame([self._row(number) for number in range(len(self.view.trials))])

    def _row(self, number: int) -> dict[str, Any]:
        trial = self.view.trials[number]
        best = trial.best(self.view.mode)
        return {
            "trial": trial.name,
            "state": trial.state,
            **trial.values,
            "step": trial.step,
            self.view.metric: best[1] if best else None,
            "best step": best[0] if best else None,
            "newest": trial.newest,
            "directory": f"{self.directory}/{trial.name}",
        }


def best_trial(view: SweepView, run_dir_of: Mapping[str, RunDir]) -> BestTrial | None:
    """The best trial of a sweep.

    Args:
        view: all trials.
        run_dir_of: the directory of each trial's run, by name.
    """
    trial = view.best
    if trial is None or (point := trial.best(view.mode)) is None:
        return None
    run_dir = run_dir_of[trial.name]
    checkpoint = best_of(CheckpointStore(run_dir).list(), f"{view.mode}:{view.metric}")
    place = run_dir.child(CHECKPOINTS, checkpoint.name) if checkpoint else ""
    return BestTrial(trial.name, run_dir.path, trial.values, *point, place)
