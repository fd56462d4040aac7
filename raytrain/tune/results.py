"""What do the trials of a sweep do, and how did the sweep end? For viewers, for `sweep.json`, and for the caller.

`SweepCallback` is a callback of Ray Tune: the driver's loop calls it at each turn. Its curves and the scheduler's state are
part of Ray Tune's own snapshots, so both are of the same moment after a restart. `SweepResult` is the outcome.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import ray
from ray.exceptions import RayError
from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from raytrain.checkpoint.manifest import best_of
from raytrain.checkpoint.store import CheckpointStore
from raytrain.elastic.membership import Demand, shortage
from raytrain.errors import ResourceError
from raytrain.events.sweep import COMPLETED, FAILED, PAUSED, PENDING, RUNNING, STOPPED, SweepView, TrialView
from raytrain.launch.monitor import NullViewer
from raytrain.rundir import CHECKPOINTS, RUN, RunDir
from raytrain.tune.scheduling import dump_scheduler, load_scheduler
from raytrain.tune.sweep_file import SWEEP

if TYPE_CHECKING:
    import pandas
    from ray.tune import ResultGrid

UPDATE_EVERY_S = 0.25
WRITE_EVERY_S = 2.0
STATES = {
    Trial.PENDING: PENDING,
    Trial.RUNNING: RUNNING,
    Trial.PAUSED: PAUSED,
    Trial.TERMINATED: STOPPED,  # or completed, after its last step
    Trial.ERROR: FAILED,
}


class Viewer(Protocol):
    """Shows a sweep; called from the driver's main thread."""

    def show(self, view: SweepView, now: float) -> None:
        """Shows the current state; `now` in Unix seconds."""

    def status(self, text: str, now: float) -> None:
        """Shows what the driver does before there are trials; `now` in Unix seconds."""


class NullSweepViewer(NullViewer):
    """Shows nothing."""

    def show(self, view: SweepView, now: float) -> None:
        """Does nothing."""


class SweepCallback(Callback):  # type: ignore[misc]
    """Keeps the view of the sweep up to date.

    Args:
        view: the sweep, without trials.
        facts: what the sweep's result depends on, for `sweep.json`.
        directory: of the sweep.
        scheduler: its state is part of the snapshots.
        broker: handle of the sweep's broker.
        viewer: shows the view.
        group: resources of one worker, workers of a smallest group, and how long the first trial may wait for it in seconds.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        view: SweepView,
        facts: dict[str, Any],
        directory: RunDir,
        scheduler: TrialScheduler,
        broker: Any,
        viewer: Viewer,
        group: tuple[dict[str, float], int, float],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.view = view
        self._facts, self._directory, self._scheduler, self._viewer = facts, directory, scheduler, viewer
        self._broker, self._group, self._clock = broker, group, clock
        self._call: Any = None
        self._demands: dict[str, Demand] = {}
        self._curves: dict[str, tuple[tuple[int, float], ...]] = {}
        self._num_steps: dict[str, int] = {}
        self._restored: bytes | None = None
        self._has_run = False
        self._next_update = self._next_write = 0.0

    # Called by Ray Tune

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        if self._restored is not None:
            load_scheduler(self._restored, self._scheduler, trials)
            self._restored = None
        now = self._clock()
        if now >= self._next_update:
            self._next_update = now + UPDATE_EVERY_S
            self._check_start(trials, now)
            self._update(trials, now)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        step, value = result.get("step"), result.get(self.view.metric)
        if step is None or value is None:
            return
        before = self._curves.get(trial.trial_id, ())
        self._curves[trial.trial_id] = (*(point for point in before if point[0] < step), (int(step), float(value)))

    def get_state(self) -> dict[str, Any]:
        return {"curves": self._curves, "scheduler": self._restored or dump_scheduler(self._scheduler)}

    def set_state(self, state: dict[str, Any]) -> None:
        self._curves, self._restored = dict(state["curves"]), state["scheduler"]

    # Called by the sweep

    def end(self, trials: list[Trial] | None, now: float) -> None:
        """Ends the view. `trials` is None for a sweep that was stopped: Ray Tune calls all its trials terminated then."""
        outcome = "completed" if trials is not None and all(trial.is_finished() for trial in trials) else "stopped"
        self.view = replace(self.view, outcome=outcome)
        self._update(trials, now) if trials is not None else self._viewer.show(self.view, now)
        self._write(now)

    def _update(self, trials: list[Trial], now: float) -> None:
        self._poll_broker()
        self.view = replace(self.view, trials=tuple(self._trial(trial) for trial in sorted(trials, key=name_of)))
        self._viewer.show(self.view, now)
        if now >= self._next_write:
            self._write(now)

    def _write(self, now: float) -> None:
        self._next_write = now + WRITE_EVERY_S
        self._directory.write_json({**self._facts, "view": asdict(self.view)}, SWEEP, default=_plain)

    def _trial(self, trial: Trial) -> TrialView:
        name = name_of(trial)
        demand = self._demands.get(f"{self.view.name}/{name}") if trial.status == Trial.RUNNING else None
        curve = self._curves.get(trial.trial_id, ())
        step = max(demand.step if demand else 0, curve[-1][0] if curve else 0)
        num_steps, state = self._length(name, step), STATES[trial.status]
        if state == STOPPED and 0 < num_steps <= step:
            state = COMPLETED
        return TrialView(
            name=name,
            state=state,
            values=dict(trial.config),
            workers=demand.num_workers if demand else 0,
            step=step,
            num_steps=num_steps,
            curve=curve,
            message=_message(trial),
        )

    def _length(self, name: str, step: int) -> int:
        """Steps of the trial's run; 0 before the run has started."""
        if step and name not in self._num_steps:
            with contextlib.suppress(FileNotFoundError):  # the driver was killed between a clone and the start of its run
                self._num_steps[name] = int(self._directory.read_json(name, RUN)["num_steps"])
        return self._num_steps.get(name, 0)

    def _poll_broker(self) -> None:
        """Takes the broker's reply if there is one, and asks again."""
        if self._call is not None:
            if not ray.wait([self._call], timeout=0)[0]:
                return
            try:
                self._demands = ray.get(self._call)
            except RayError:
                self._demands = {}
        self._call = self._broker.demands.remote()

    def _check_start(self, trials: list[Trial], now: float) -> None:
        """Raises ResourceError if no trial has started within the time that a run's start may take."""
        resources, num_workers, limit_s = self._group
        self._has_run |= any(trial.status != Trial.PENDING for trial in trials)
        if self._has_run or now - self.view.started <= limit_s:
            return
        raise ResourceError(
            "run.workers",
            f"at least {num_workers} for each trial; no trial could start for {limit_s:g} s",
            shortage(resources, num_workers, ray.cluster_resources()),
            "lower run.workers or run.cpus_per_worker, add nodes, or raise run.start_timeout_s",
        )


def name_of(trial: Trial) -> str:
    """The name of a trial's directory: trial-0003 for the one with number 3."""
    return f"trial-{int(trial.experiment_tag.partition('_')[0]):04d}"


def _plain(value: Any) -> Any:
    """A JSON value for one that JSON does not know: a numpy scalar's number, or the text of anything else."""
    return value.item() if isinstance(value, np.generic) else str(value)


def _message(trial: Trial) -> str:
    if trial.status != Trial.ERROR:
        return ""
    error = trial.get_error()
    return str(getattr(error, "cause", None) or error or "its process ended")


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

        return pandas.DataFrame([self._row(trial) for trial in self.view.trials])

    def _row(self, trial: TrialView) -> dict[str, Any]:
        best_step, best_value = trial.best(self.view.mode) or (None, None)
        return {
            "trial": trial.name,
            "state": trial.state,
            **trial.values,
            "step": trial.step,
            self.view.metric: best_value,
            "best step": best_step,
            "newest": trial.newest,
            "directory": f"{self.directory}/{trial.name}",
        }


def best_trial(view: SweepView, storage: str) -> BestTrial | None:
    """The best trial of a sweep, whose trials' runs have this storage."""
    trial = view.best
    if trial is None or (point := trial.best(view.mode)) is None:
        return None
    run_dir = RunDir.at(storage, trial.name)
    checkpoint = best_of(CheckpointStore(run_dir).list(), f"{view.mode}:{view.metric}")
    path = run_dir.child(CHECKPOINTS, checkpoint.name) if checkpoint else ""
    return BestTrial(trial.name, run_dir.path, trial.values, *point, path)
