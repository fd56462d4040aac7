"""Runs a sweep on Ray Tune: connects to Ray, starts the broker, begins or goes on, and listens to signals."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray import tune
from ray.tune import ResumeConfig
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback

from raytrain.config import RunConfig
from raytrain.elastic.variables import variables
from raytrain.events.sweep import SweepView
from raytrain.launch import cluster, storage
from raytrain.rundir import RunDir
from raytrain.sweep_config import SweepConfig
from raytrain.tune.board import Board, Viewer, name_of
from raytrain.tune.broker import broker_of
from raytrain.tune.deal import room_for
from raytrain.tune.description import has_trials
from raytrain.tune.interrupt import interruptible
from raytrain.tune.recipe import Recipe
from raytrain.tune.schedulers import Choice
from raytrain.tune.trainable import as_trainable
from raytrain.tune.trial import Terms

QUIET = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}
"""Ray Tune's variables: what it would show is shown by us, and what it knows is saved each second."""


@dataclass(frozen=True)
class Engine:
    """What Ray Tune is asked to run.

    Args:
        recipe, sweep, space: of the sweep.
        choice: its scheduler and its searcher.
        example: the settings of one of its trials.
    """

    recipe: Recipe
    sweep: SweepConfig
    space: Mapping[str, Any]
    choice: Choice
    example: RunConfig

    @property
    def max_workers(self) -> int | None:
        """Most workers of all trials together."""
        return self.sweep.workers[1] if self.sweep.workers else None

    def run(
        self, view: SweepView, facts: dict[str, Any], directory: RunDir, viewer: Viewer
    ) -> tuple[tune.ExperimentAnalysis, SweepView, int | None]:
        """Returns when all trials have ended, or when a signal has stopped the sweep.

        Args:
            view: of the sweep, without trials.
            facts: for `sweep.json`.
            directory: of the sweep.
            viewer: is shown all trials.

        Returns:
            Ray Tune's result, the last view, and the number of the signal if there was one.
        """
        viewer.say("connecting to Ray" if cluster.is_somewhere() else "starting Ray on this machine", time.time())
        with interruptible() as interrupts, cluster.connected(), _quiet():
            interrupts.listen()  # `ray.init` has a handler of its own for SIGTERM
            worker = cluster.worker_resources(self.example, cluster.choose_accelerator(self.example.accelerator))
            cluster.check_room(self.example, worker)
            storage.check_shared(directory, self.recipe.config.storage)
            broker = broker_of(view.name, self.sweep.policy, view.mode, self.max_workers)
            group = worker, self.example.min_workers, self.example.start_timeout_s
            board = Board(view, facts, directory, self.choice.scheduler, broker, viewer, group)
            try:
                analysis = self._tune(board, max(1, room_for(ray.cluster_resources(), worker) // self.example.min_workers))
            finally:
                ray.kill(broker)
            board.end(None if interrupts.signal else analysis.trials, time.time())
            return analysis, board.view, interrupts.signal

    def _tune(self, board: Board, num_fitting: int) -> tune.ExperimentAnalysis:
        """Args: num_fitting: trials of the smallest size for which the cluster has room now."""
        most = None if self.max_workers is None else max(1, self.max_workers // self.example.min_workers)
        search, concurrent = self.choice.search(self.sweep, most, num_fitting)
        return tune.run(
            as_trainable(self.recipe, Terms(self.sweep.policy, self.max_workers, board.view.metric)),
            config=dict(self.space),
            num_samples=self.sweep.trials,
            metric=board.view.metric,
            mode=board.view.mode,
            scheduler=self.choice.scheduler,
            search_alg=search,
            max_concurrent_trials=concurrent,
            name=board.view.name,
            storage_path=self.recipe.config.storage,
            trial_dirname_creator=name_of,
            callbacks=[board, JsonLoggerCallback(), CSVLoggerCallback()],
            reuse_actors=True,
            resume_config=ResumeConfig() if has_trials(RunDir.at(self.recipe.config.storage, board.view.name)) else None,
            raise_on_failed_trial=False,
            verbose=0,
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray Tune's own words are not shown: they are told by the viewer."""
    loggers = [logging.getLogger(name) for name in ("ray.tune", "ray.train", "ray.air")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with variables(QUIET):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
