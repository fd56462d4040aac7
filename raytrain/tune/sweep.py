"""`raytrain.Sweep`: a hyperparameter search over elastic runs, with Ray Tune's schedulers and searchers.

Runs in the driver: checks what can be checked before the first trial, begins or resumes, runs Ray Tune and handles signals
meanwhile, and returns the outcome. What a trial does is in `trial`, which workers it gets in `broker`.
"""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import ray
from ray import tune
from ray.tune import ResultGrid, ResumeConfig
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback
from ray.tune.schedulers import TrialScheduler

from raytrain.config import RunConfig
from raytrain.elastic.environment import environment_set
from raytrain.errors import ConfigError
from raytrain.events.sweep import SweepView
from raytrain.launch import cluster, storage
from raytrain.launch.lock import locked
from raytrain.launch.monitor import StopRequest, exit_on_signals, restored_handlers
from raytrain.launch.schedule import build_schedule
from raytrain.rundir import RunDir
from raytrain.sweep_config import SweepConfig
from raytrain.task import Task
from raytrain.tune import sweep_file
from raytrain.tune.allocation import workers_that_fit
from raytrain.tune.broker import broker_of
from raytrain.tune.reporter import check_metric
from raytrain.tune.results import NullSweepViewer, SweepCallback, SweepResult, Viewer, best_trial, name_of
from raytrain.tune.scheduling import Algorithms
from raytrain.tune.space import check_keys, example, num_trials
from raytrain.tune.trial import SweepOptions, TrialTemplate, as_trainable, check_elasticity

STOP_TUNE = signal.SIGUSR1
"""On this signal Ray Tune saves the sweep and ends it; while Ray Tune runs, it has a handler for it."""
TUNE_VARIABLES = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}
"""Environment of Ray Tune: it shows nothing, since the viewer does, and saves its state each second."""


class Sweep:
    """A hyperparameter search.

    Args:
        task: the class of the task, or a function that makes one of a trial's hyperparameters.
        space: what differs between trials, with Ray Tune's domains: {"lr": tune.loguniform(1e-3, 1)}. Keys are fields of
            the task, or settings of the run after "run.".
        config: settings of every run. Its name and storage are those of the sweep, its workers those of one trial.
        sweep: settings of the sweep; `settings` override them one by one.
        fixed: fields of the task that are the same in every trial.
        trial_workers: instead of `config.workers`.
        scheduler, search: by name, as in `SweepConfig`, or an object of Ray Tune, without metric and mode.
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
        config = run_config(task, config or RunConfig(), self._sweep, trial_workers)
        self._template, self._space = TrialTemplate.of(task, config, fixed), dict(space)
        check_keys(self._space, self._template.fields)
        check_elasticity(config)
        self._algorithms = Algorithms.of(
            None if isinstance(scheduler, str) else scheduler,
            None if isinstance(search, str) else search,
            *(self._sweep, config, self._space),
        )

    @property
    def directory(self) -> RunDir:
        """The sweep's directory; each trial's run has a directory of its own below it."""
        return storage.locate(self._template.config.storage, self._template.config.name)

    def fit(self, viewer: Viewer | None = None) -> SweepResult:
        """Runs all trials, or those that are left, until they have ended or a signal stops the sweep.

        Args:
            viewer: shows all trials; None for no output.

        Raises:
            FourPartError: the settings, the data, the storage or the cluster do not fit; before any trial starts.
            TaskError: the task's `data` raised.
        """
        view, config = self._view(), self._template.config
        task, trial_config = self._template.resolve(example(self._space))
        shown = viewer or NullSweepViewer()
        work = build_schedule(task, trial_config, lambda text: shown.status(text, time.time()))
        check_metric(view.metric, task, work)
        directory = storage.check_writable(config.storage, config.name)
        with locked(directory, lambda text: shown.status(text, time.time())):
            before = sweep_file.earlier_facts(directory, config.resume)
            facts = sweep_file.describe(self._template, self._sweep, self._space, self._algorithms, work)
            sweep_file.check_same(directory, before, facts)
            analysis, view, stopped_by = self._run(view, facts, trial_config, shown)
        was_complete = before is not None and before["view"]["outcome"] == "completed"
        return SweepResult(
            name=config.name,
            directory=directory.path,
            outcome="already complete" if was_complete else view.outcome,
            best=best_trial(view, f"{config.storage}/{config.name}"),
            view=view,
            grid=ResultGrid(analysis),
            stopped_by=stopped_by,
        )

    def _view(self) -> SweepView:
        mode, _, metric = self._template.config.best.partition(":")
        return SweepView(
            name=self._template.config.name,
            directory=self.directory.path,
            metric=metric,
            mode=mode,
            num_trials=num_trials(self._space, self._sweep.trials),
            started=time.time(),
        )

    def _run(
        self, view: SweepView, facts: dict[str, Any], trial_config: RunConfig, viewer: Viewer
    ) -> tuple[tune.ExperimentAnalysis, SweepView, int | None]:
        """Returns when all trials have ended, or when a signal has stopped the sweep.

        Returns:
            Ray Tune's result, the last view, and the number of the signal if there was one.
        """
        viewer.status("connecting to Ray" if cluster.is_somewhere() else "starting Ray on this machine", time.time())
        with (
            stop_signals() as stop,
            cluster.connected(trial_config.start_timeout_s, cluster.forked(trial_config)),
            _quiet_tune(),
        ):
            stop.listen()
            worker = cluster.worker_resources(trial_config, cluster.choose_accelerator(trial_config.accelerator))
            cluster.check_room(trial_config, worker)
            storage.check_shared(self.directory, self._template.config.storage)
            broker = broker_of(view.name, self._sweep.policy, view.mode, self._max_workers)
            group = worker, trial_config.min_workers, trial_config.start_timeout_s
            callback = SweepCallback(view, facts, self.directory, self._algorithms.scheduler, broker, viewer, group)
            num_fitting = workers_that_fit(ray.cluster_resources(), worker) // trial_config.min_workers
            try:
                analysis = self._tune(callback, trial_config, max(1, num_fitting))
            finally:
                ray.kill(broker)
            callback.end(None if stop.signal else analysis.trials, time.time())
            return analysis, callback.view, stop.signal

    @property
    def _max_workers(self) -> int | None:
        """Of all trials together."""
        return self._sweep.workers[1] if self._sweep.workers else None

    def _tune(self, callback: SweepCallback, trial_config: RunConfig, num_fitting: int) -> tune.ExperimentAnalysis:
        """Runs Ray Tune; `num_fitting` trials of the smallest size fit into the cluster now."""
        view, config = callback.view, self._template.config
        max_trials = None if self._max_workers is None else max(1, self._max_workers // trial_config.min_workers)
        search, concurrent = self._algorithms.search(self._sweep, max_trials, num_fitting)
        return tune.run(
            as_trainable(self._template, SweepOptions(self._sweep.policy, self._max_workers, view.metric)),
            config=dict(self._space),
            num_samples=self._sweep.trials,
            metric=view.metric,
            mode=view.mode,
            scheduler=self._algorithms.scheduler,
            search_alg=search,
            max_concurrent_trials=concurrent,
            name=view.name,
            storage_path=config.storage,
            trial_dirname_creator=name_of,
            callbacks=[callback, JsonLoggerCallback(), CSVLoggerCallback()],
            reuse_actors=True,
            resume_config=ResumeConfig() if sweep_file.has_trials(self.directory) else None,
            raise_on_failed_trial=False,
            verbose=0,
        )


def run_config(task: Callable[..., Task], config: RunConfig, sweep: SweepConfig, trial_workers: Any) -> RunConfig:
    """The settings of every run: with the sweep's name and metric, and the workers of one trial.

    Raises:
        ConfigError: a metric is given without a mode, or the other way round.
    """
    if bool(sweep.metric) != bool(sweep.mode):
        given, missing = ("metric", "mode") if sweep.metric else ("mode", "metric")
        rule = "metric and mode go together: which metric, and whether the smallest or the largest value is best"
        raise ConfigError(f"sweep.{missing}", f"not given, and sweep.{given} is", rule, f"give sweep.{missing} too")
    kebab_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", getattr(task, "__name__", "task")).lower()
    changed: dict[str, Any] = {"name": config.name or f"{kebab_case}-sweep"}
    if sweep.metric:
        changed["best"] = f"{sweep.mode}:{sweep.metric}"
    if trial_workers is not None:
        changed["workers"] = trial_workers
    return RunConfig(**config.model_dump() | changed)


class TuneStop(StopRequest):
    """Signals during a sweep: the first one stops Ray Tune by the signal that Ray Tune has for that.

    Args:
        before: the handler of `STOP_TUNE` before this sweep, perhaps one that an earlier sweep has left.
    """

    def __init__(self, before: Any) -> None:
        super().__init__()
        self._before = before

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Ends the driver on a second signal, or if Ray Tune does not run yet."""
        is_first = self.signal is None
        super().on_signal(number, frame)
        handler = signal.getsignal(STOP_TUNE)
        if is_first and callable(handler) and handler is not self._before:
            signal.raise_signal(STOP_TUNE)
        elif is_first:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


@contextmanager
def stop_signals() -> Iterator[TuneStop]:
    """Restores all handlers at the end; `TuneStop.listen` installs its own."""
    with exit_on_signals(), restored_handlers(STOP_TUNE):
        yield TuneStop(signal.getsignal(STOP_TUNE))


@contextmanager
def _quiet_tune() -> Iterator[None]:
    """Ray Tune shows and logs nothing."""
    loggers = [logging.getLogger(name) for name in ("ray.tune", "ray.train", "ray.air")]
    with environment_set(TUNE_VARIABLES), ExitStack() as stack:
        for logger in loggers:
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        yield
