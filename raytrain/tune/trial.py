"""A trial of a sweep: one elastic run, carried by the process that Ray Tune starts for it.

It takes its smallest group of workers from the trial's own placement group and the rest from the sweep's broker, reports
each evaluation to Ray Tune, and goes on where its run was, or where another trial's was.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from threading import Thread
from typing import Any

import ray
from ray import tune

from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.elastic.places import Share
from raytrain.errors import ConfigError, ResumeError
from raytrain.events.kinds import Event
from raytrain.events.log import read
from raytrain.launch.trainer import Trainer
from raytrain.rundir import RunDir
from raytrain.tune.broker import broker_of
from raytrain.tune.clone import clone, forget
from raytrain.tune.recipe import Recipe
from raytrain.tune.reference import Reference, read_reference
from raytrain.tune.reports import Replay, Report, Reports

KEPT = 3
"""Checkpoints that stay because they were reported last: others may clone them a little later."""
END_LIMIT_S = 5.0
"""What a run may take to end, once Ray Tune has ended its trial: its workers go at once, its log is closed."""


@dataclass(frozen=True)
class Terms:
    """What all trials of a sweep have in common besides the recipe.

    Args:
        policy: of the broker, "fair" or "best".
        max_workers: of all trials together; None for what there is room for.
        must_report: a metric that every trial must have; "" for none.
    """

    policy: str = "fair"
    max_workers: int | None = None
    must_report: str = ""


def run_trial(recipe: Recipe, terms: Terms, values: Mapping[str, Any]) -> None:
    """Trains to the end, or until Ray Tune ends the trial, which raises SystemExit in `tune.report`.

    Raises what `Trainer.fit` raises, and:
        ConfigError: the trial does not report the sweep's metric, or clones a run whose steps have other rows.
    """
    os.chdir(os.environ.get("TUNE_ORIG_WORKING_DIR", "."))  # Ray Tune has changed it
    EndsInOrder.thread = threading.current_thread()
    context = tune.get_context()
    sweep, name = context.get_experiment_name(), PurePath(context.get_trial_dir()).name
    task, config = recipe.resolve(values, storage=f"{recipe.config.storage}/{sweep}", name=name, resume="auto")
    share = share_of(sweep, name, config, terms)
    trainer, reference = Trainer(task, config, share), read_reference(tune.get_checkpoint())
    run_dir = trainer.run_dir
    known = 0 if reference is None else reference.step
    if reference is not None and (reference.storage, reference.name) != (config.storage, name):
        known = clone(reference, run_dir, config, values)
    reporter = Reporter(config, terms, share, known)
    reporter.replay(run_dir)
    try:
        trainer.fit(reporter)
    except ResumeError:
        if reference is not None:
            raise
        forget(run_dir)  # of a trial that the sweep does not know any more: it was killed before that was written down
        trainer.fit(reporter)


class EndsInOrder:
    """Mixed into the class that Ray Tune makes of a function: the process stays until the run has ended, too."""

    thread: Thread | None = None
    """In which the trial of this process runs, or has run last."""

    def cleanup(self) -> None:
        super().cleanup()  # type: ignore[misc]  # raises SystemExit in the run's thread
        if EndsInOrder.thread is not None:
            Thread.join(EndsInOrder.thread, END_LIMIT_S)


def share_of(sweep: str, name: str, config: RunConfig, terms: Terms) -> Share:
    """The trial's part of the cluster: the bundles after the first one are its smallest group's."""
    broker = broker_of(sweep, terms.policy, config.best.partition(":")[0], terms.max_workers)
    bundles = tuple(range(1, 1 + config.min_workers))
    return Share(broker, f"{sweep}/{name}", ray.util.get_current_placement_group(), bundles)


class Reporter:
    """Watches the run, and reports.

    Args:
        config: of the run.
        terms: of the sweep.
        share: the trial's part of the cluster; its broker is told the values of `run.best`.
        known: finished steps up to which Ray Tune knows all reports.
        report: `ray.tune.report`.
    """

    def __init__(
        self, config: RunConfig, terms: Terms, share: Share, known: int, report: Callable[..., None] = tune.report
    ) -> None:
        self._config, self._terms, self._share, self._known, self._report = config, terms, share, known, report
        self._reports, self._pinned = Reports(self._is_saved_at), deque[str](maxlen=KEPT)
        self._store = CheckpointStore(RunDir.at(config.storage, config.name))
        self._is_over = False

    def replay(self, run_dir: RunDir) -> None:
        """Reports what the run had done before and Ray Tune does not know; what is done again is reported then."""
        newest = self._store.newest_verified()
        for report in Replay(self._reports).over(read(run_dir), newest.step if newest else 0):
            self._tell(report)

    def on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            for report in self._reports.take(event):
                self._tell(report)

    def tick(self, now: float) -> None:
        """Nothing is due by time."""

    def say(self, text: str, now: float) -> None:
        """Nobody listens."""

    def _is_saved_at(self, step: int) -> bool:
        run = self._reports.run
        every = self._config.checkpoint_every or (run.steps_per_epoch if run else 1)
        return step % every == 0 or (run is not None and step == run.num_steps)

    def _tell(self, report: Report) -> None:
        """Blocks until Ray Tune has decided that the trial goes on; what it does not want any more is not told."""
        if self._is_over or report.step <= self._known:
            return
        self._check_metric(report.metrics)
        self._known = report.step
        metric = self._config.best.partition(":")[2]
        if metric in report.metrics:
            self._share.broker.tell.remote(self._share.name, report.step, report.metrics[metric])
        try:
            if not report.checkpoint:
                self._report(report.metrics)
                return
            self._pinned.append(report.checkpoint)
            self._store.pin(list(self._pinned))
            place = self._config.storage, self._config.name
            with Reference(*place, report.step, report.checkpoint).as_checkpoint() as checkpoint:
                self._report(report.metrics, checkpoint=checkpoint)
        except SystemExit:
            self._is_over = True
            raise

    def _check_metric(self, metrics: Mapping[str, float]) -> None:
        wanted = self._terms.must_report
        if wanted and wanted not in metrics:
            known = ", ".join(name for name in metrics if "/" in name)
            raise ConfigError("sweep.metric", wanted, f"is a metric that a trial reports: {known}", "choose one of them")
