"""`raytrain.Sweep`: a hyperparameter search over elastic runs, on Ray Tune's own schedulers and searchers.

Runs in the driver: checks everything that can be checked, begins or goes on, and puts the outcome together. What a trial
does is in `trial`, who gets which workers in `deal`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ray.tune import ResultGrid
from ray.tune.schedulers import TrialScheduler

from raytrain.config import RunConfig
from raytrain.events.sweep import SweepView
from raytrain.launch import storage
from raytrain.launch.work import schedule
from raytrain.rundir import RunDir
from raytrain.sweep_config import SweepConfig
from raytrain.task import Task
from raytrain.tune import description
from raytrain.tune.board import Nobody, Viewer, name_of
from raytrain.tune.engine import Engine
from raytrain.tune.metrics import check_metric
from raytrain.tune.outcome import SweepResult, best_trial
from raytrain.tune.recipe import recipe
from raytrain.tune.schedulers import Choice
from raytrain.tune.space import check_keys
from raytrain.tune.trainable import check_elasticity


class Sweep:
    """A hyperparameter search.

    Args:
        task: the class of the task, or a function that makes one of the values of a trial.
        space: what differs between trials, with Ray Tune's domains: {"lr": tune.loguniform(1e-3, 1)}. Keys are fields of
            the task, or settings of the run after "run.".
        config: settings of every run. Its name and storage are those of the sweep, its workers those of one trial.
        sweep: settings of the sweep; `settings` stand for them one by one.
        fixed: fields of the task that are the same in every trial.
        trial_workers: instead of `config.workers`.
        scheduler, search: by name, as in `SweepConfig`, or an object of Ray Tune's, without metric and mode.
        settings: of `SweepConfig`: trials, metric, mode, workers, concurrent, policy, seed.

    Raises:
        ConfigError: a setting is wrong, a key of the space is unknown, or there is more than one searcher.
    """

    def __init__(
        self,
        task: Callable[..., Task],
        space: Mapping[str, Any],
        *,
        config: RunConfig | None = None,
        sweep: SweepConfig | None = None,
        fixed: Mapping[str, Any] | None = None,
        trial_workers: Any = None,
        scheduler: str | TrialScheduler | None = None,
        search: Any = None,
        **settings: Any,
    ) -> None:
        names = {key: value for key, value in (("scheduler", scheduler), ("search", search)) if isinstance(value, str)}
        self._sweep = SweepConfig(**{**(sweep.model_dump() if sweep else {}), **names, **settings})
        config = description.run_config(task, config or RunConfig(), self._sweep, trial_workers)
        self._recipe, self._space = recipe(task, config, fixed), dict(space)
        check_keys(self._space, self._recipe.fields)
        check_elasticity(config)
        self._choice = Choice.of(
            None if isinstance(scheduler, str) else scheduler,
            None if isinstance(search, str) else search,
            *(self._sweep, config, self._space),
        )

    @property
    def directory(self) -> RunDir:
        """Where the sweep is, or will be: each trial's run is in a directory of its own below it."""
        return storage.locate(self._recipe.config.storage, self._recipe.config.name)

    def fit(self, viewer: Viewer | None = None) -> SweepResult:
        """Runs all trials, or those that are left, until they have ended or a signal stops the sweep.

        Args:
            viewer: is shown all trials again and again; None for nobody.

        Raises:
            FourPartError: the settings, the data, the storage or the cluster do not fit; before any trial starts.
            TaskError: the task's `data` raised.
        """
        view, config = self._view(), self._recipe.config
        task, example = self._recipe.resolve(description.example(self._space))
        work = schedule(task, example)
        check_metric(view.metric, task, work)
        directory = storage.check_writable(config.storage, config.name)
        before = description.earlier(directory, config.resume)
        facts = description.facts(self._recipe, self._sweep, self._space, self._choice, work)
        description.check_same(directory, before, facts)
        engine = Engine(self._recipe, self._sweep, self._space, self._choice, example)
        analysis, board, stopped_by = engine.run(view, facts, directory, viewer or Nobody())
        was_complete = before is not None and before["view"]["outcome"] == "completed"
        runs = {name_of(trial): RunDir.at(f"{config.storage}/{config.name}", name_of(trial)) for trial in analysis.trials}
        return SweepResult(
            name=config.name,
            directory=directory.path,
            outcome="already complete" if was_complete else board.outcome,
            best=best_trial(board, runs),
            view=board,
            grid=ResultGrid(analysis),
            stopped_by=stopped_by,
        )

    def _view(self) -> SweepView:
        mode, _, metric = self._recipe.config.best.partition(":")
        view = SweepView(
            name=self._recipe.config.name,
            directory=self.directory.path,
            metric=metric,
            mode=mode,
            num_trials=description.num_trials(self._space, self._sweep.trials),
        )
        return replace(view, started=time.time())
