"""Keeps the board of a sweep: what each trial is and does, for whoever watches, and for `sweep.json`.

It is a callback of Ray Tune's, called in the driver at each turn of its loop. What it knows of the trials' values, and the
scheduler's state with it, goes into Ray Tune's own snapshots, so that all of it is of one moment after a restart.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Protocol

import numpy as np
import ray
from ray.exceptions import RayError
from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from raytrain.elastic.capacity import shortage
from raytrain.elastic.quota import Claim
from raytrain.errors import ResourceError
from raytrain.events import sweep as views
from raytrain.events.sweep import SweepView, TrialView
from raytrain.rundir import RUN, RunDir
from raytrain.tune import memory
from raytrain.tune.description import SWEEP

LOOK_EVERY_S = 0.25
WRITE_EVERY_S = 2.0
STATES = {
    Trial.PENDING: views.PENDING,
    Trial.RUNNING: views.RUNNING,
    Trial.PAUSED: views.PAUSED,
    Trial.TERMINATED: views.STOPPED,
    Trial.ERROR: views.FAILED,
}
"""Of a trial that has ended before its last step, or not at all."""


class Viewer(Protocol):
    """Somebody who watches a sweep; called from the driver's main thread."""

    def show(self, view: SweepView, now: float) -> None:
        """Takes what is known now; `now` in Unix seconds."""

    def say(self, text: str, now: float) -> None:
        """What the driver does before there are trials; `now` in Unix seconds."""


class Nobody:
    """Does not watch."""

    def show(self, view: SweepView, now: float) -> None:
        """Looks away."""

    def say(self, text: str, now: float) -> None:
        """Looks away."""


class Board(Callback):  # type: ignore[misc]
    """The board.

    Args:
        view: the sweep, without trials.
        facts: what the sweep's result depends on, for `sweep.json`.
        directory: of the sweep.
        scheduler: whose state is kept.
        broker: handle of the sweep's broker.
        viewer: is shown the board.
        group: resources of one worker, and how many a trial needs; how long the first trial may wait for them, in seconds.
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
        self._asked: Any = None
        self._claims: dict[str, Claim] = {}
        self._curves: dict[str, tuple[tuple[int, float], ...]] = {}
        self._num_steps: dict[str, int] = {}
        self._restored: bytes | None = None
        self._has_run = False
        self._next_look = self._next_write = 0.0

    # Called by Ray Tune

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        if self._restored is not None:
            memory.load(self._restored, self._scheduler, trials)
            self._restored = None
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            self._check_start(trials, now)
            self.look(trials, now)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        step, value = result.get("step"), result.get(self.view.metric)
        if step is None or value is None:
            return
        before = self._curves.get(trial.trial_id, ())
        self._curves[trial.trial_id] = (*(point for point in before if point[0] < step), (int(step), float(value)))

    def get_state(self) -> dict[str, Any]:
        return {"curves": self._curves, "scheduler": self._restored or memory.dump(self._scheduler)}

    def set_state(self, state: dict[str, Any]) -> None:
        self._curves, self._restored = dict(state["curves"]), state["scheduler"]

    # Called by the sweep, too

    def look(self, trials: list[Trial], now: float) -> None:
        """Shows what is known now, and writes it down."""
        self._ask()
        self.view = replace(self.view, trials=tuple(self._trial(trial) for trial in sorted(trials, key=name_of)))
        self._viewer.show(self.view, now)
        if now >= self._next_write:
            self._write(now)

    def end(self, trials: list[Trial] | None, now: float) -> None:
        """Ends the board; without trials where the sweep was stopped, since Ray Tune calls all of them ended then."""
        outcome = "completed" if trials is not None and all(trial.is_finished() for trial in trials) else "stopped"
        self.view = replace(self.view, outcome=outcome)
        self.look(trials, now) if trials is not None else self._viewer.show(self.view, now)
        self._write(now)

    def _write(self, now: float) -> None:
        self._next_write = now + WRITE_EVERY_S
        self._directory.write_json({**self._facts, "view": asdict(self.view)}, SWEEP, default=_plain)

    def _trial(self, trial: Trial) -> TrialView:
        name = name_of(trial)
        claim = self._claims.get(f"{self.view.name}/{name}") if trial.status == Trial.RUNNING else None
        curve = self._curves.get(trial.trial_id, ())
        step = max(claim.step if claim else 0, curve[-1][0] if curve else 0)
        num_steps, state = self._length(name, step), STATES[trial.status]
        if state == views.STOPPED and 0 < num_steps <= step:
            state = views.COMPLETED
        return TrialView(
            name=name,
            state=state,
            values=dict(trial.config),
            workers=claim.num_workers if claim else 0,
            step=step,
            num_steps=num_steps,
            curve=curve,
            message=_message(trial),
        )

    def _length(self, name: str, step: int) -> int:
        """Steps of the trial's run; 0 before it has begun."""
        if step and name not in self._num_steps:
            with contextlib.suppress(FileNotFoundError):  # the driver died after a clone was made, before its run began
                self._num_steps[name] = int(self._directory.read_json(name, RUN)["num_steps"])
        return self._num_steps.get(name, 0)

    def _ask(self) -> None:
        """Takes what the broker knows of the trials, if it has answered, and asks again."""
        if self._asked is not None and not ray.wait([self._asked], timeout=0)[0]:
            return
        if self._asked is not None:
            try:
                self._claims = ray.get(self._asked)
            except RayError:
                self._claims = {}
        self._asked = self._broker.claims.remote()

    def _check_start(self, trials: list[Trial], now: float) -> None:
        """Nobody waits for ever for a cluster that is too small.

        Raises:
            ResourceError: no trial has started within the time that a run's start may take.
        """
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
    """The name of a trial's directory: trial-0003 for the one that was made as number 3."""
    return f"trial-{int(trial.experiment_tag.partition('_')[0]):04d}"


def _plain(value: Any) -> Any:
    """What stands for a value that JSON does not know: the number of a numpy scalar, the text of anything else."""
    return value.item() if isinstance(value, np.generic) else str(value)


def _message(trial: Trial) -> str:
    if trial.status != Trial.ERROR:
        return ""
    error = trial.get_error()
    return str(getattr(error, "cause", None) or error or "its process ended")
