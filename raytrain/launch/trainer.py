"""Runs a task on Ray, from the checks before it to the result after it. Runs in the driver's process."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.train import TrainingFailedError

from raytrain.checkpoint.retention import best_of
from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.elastic.places import Share
from raytrain.elastic.variables import forwarded
from raytrain.errors import RaytrainError
from raytrain.events.kinds import RunEnded, RunStarted
from raytrain.launch import cluster, resume, storage
from raytrain.launch.elasticity import RayTrainer, build_trainer, is_in_place, open_rendezvous
from raytrain.launch.failures import own_error, with_rows
from raytrain.launch.result import Result
from raytrain.launch.sink import EventSink
from raytrain.launch.stopping import StopWish, listen
from raytrain.launch.watch import Nobody, StopLimit, Viewer, Watch
from raytrain.launch.work import Schedule, schedule
from raytrain.rundir import CHECKPOINTS, RUN, RunDir
from raytrain.task import Task
from raytrain.worker.entry import Work

CLOSE_LIMIT_S = 15.0
"""What Ray Train's own end may take; the run has been told to be over by then."""


class Trainer:
    """Trains a task.

    Args:
        task: what is trained.
        config: how; by default one worker, one epoch.
        share: the run's part of a cluster that it shares with others, as the trials of a sweep do.
    """

    def __init__(self, task: Task, config: RunConfig | None = None, share: Share | None = None) -> None:
        config = config or RunConfig()
        name = config.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", type(task).__name__).lower()
        settings = config.model_dump() | {"name": name, "storage": storage.absolute(config.storage)}
        self._task, self._config, self._share = task, RunConfig(**settings), share
        self._is_moved = storage.is_moved(config.storage)

    @property
    def run_dir(self) -> RunDir:
        """Where the run is, or will be.

        Raises:
            StorageError: the storage is not understood.
        """
        return storage.locate(self._config.storage, self._config.name)

    def fit(self, viewer: Viewer | None = None) -> Result:
        """Trains until the run is complete, or until a signal stops it.

        Args:
            viewer: is told each event; None for nobody.

        Raises:
            FourPartError: the settings, the data, the storage or the cluster do not fit; before any worker starts.
            TaskError: the task's own code raised.
            WorkersLostError: workers were lost again and again without progress.
            CheckpointError: the last checkpoint could not be saved.
        """
        before = resume.earlier_facts(self.run_dir, self._config.resume)
        config = resume.with_logical_workers(self._config, before)
        work = schedule(self._task, config)
        run_dir = storage.check_writable(config.storage, config.name)
        facts = resume.describe(self._task, config, work)
        done = resume.newest_step(run_dir)
        resume.check_same(run_dir, before, facts, done if type(self._task).scheduler is Task.scheduler else None)
        if done >= work.num_steps:
            return _result(run_dir, config, "already complete")
        viewer = viewer or Nobody()
        if self._is_moved:
            viewer.say(storage.moved_to(run_dir), time.time())
        with listen() as wish:
            outcome = self._train(config, work, facts, viewer, wish)
        return _result(run_dir, config, outcome, wish.signal if outcome == "stopped" else None)

    def _train(self, config: RunConfig, work: Schedule, facts: dict[str, Any], viewer: Viewer, wish: StopWish) -> str:
        """Trains on Ray, and tells how it ended: "completed" or "stopped"."""
        run_dir, in_place = self.run_dir, is_in_place(config.elasticity, viewer)
        viewer.say("connecting to Ray" if cluster.is_somewhere() else "starting Ray on this machine", time.time())
        with cluster.connected():
            wish.listen()  # `ray.init` has a handler of its own for SIGTERM
            accelerator = cluster.choose_accelerator(config.accelerator)
            cluster.check_room(config, cluster.worker_resources(config, accelerator))
            storage.check_shared(run_dir, config.storage)
            run_dir.write_json(facts, RUN)
            CheckpointStore(run_dir).delete_incomplete()
            order = self._order(config, work, accelerator)
            with _actors(config, in_place) as (sink, rendezvous), _scratch_directory() as scratch:
                watch = Watch(sink, rendezvous, viewer, wish, config.stop_grace_s)
                watch.tell(_run_started(config, work, run_dir))
                viewer.say("starting workers", time.time())
                trainer = build_trainer(
                    *(order, sink, rendezvous, in_place, scratch),
                    is_complete=lambda: resume.newest_step(run_dir) >= work.num_steps,
                    while_running=watch.look,
                    share=self._share,
                )
                return _run(trainer, run_dir, work, watch)

    def _order(self, config: RunConfig, work: Schedule, accelerator: str) -> Work:
        return Work(
            task=self._task,
            config=config,
            sources=work.sources,
            plans=work.plans,
            num_steps=work.num_steps,
            run_facts={"name": config.name, "num_steps": work.num_steps, "num_logical": config.num_logical},
            storage=config.storage,
            name=config.name,
            environment=forwarded(os.environ, config.forward_env),
            accelerator=accelerator,
        )


def _run(trainer: RayTrainer, run_dir: RunDir, work: Schedule, watch: Watch) -> str:
    """Trains, and tells how it ended: "completed" or "stopped"."""
    ended, message = "failed", ""
    try:
        try:
            trainer.fit()
        except StopLimit as limit:
            message = str(limit)
        except KeyboardInterrupt:
            message = "a second signal ended it at once"
        except SystemExit:  # of the viewer, who wants no more of it
            ended, message = "stopped", "ended by whoever watched it"
            raise
        except (TrainingFailedError, RaytrainError) as error:
            cause = with_rows(error if isinstance(error, RaytrainError) else own_error(error), work.train)
            message = str(cause)
            raise cause from None
        ended = "completed" if resume.newest_step(run_dir) >= work.num_steps else "stopped"
    finally:
        watch.finish(RunEnded(outcome=ended, step=resume.newest_step(run_dir), message=message, time=time.time()))
        trainer.close(CLOSE_LIMIT_S)
    return ended


@contextmanager
def _scratch_directory() -> Iterator[str]:
    """Ray Train insists on a storage of its own; nothing of value goes there."""
    path = tempfile.mkdtemp(prefix="raytrain-")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _actors(config: RunConfig, in_place: bool) -> Iterator[tuple[Any, Any]]:
    """The event sink and the rendezvous of a run; gone after the block."""
    sink = cluster.pinned(EventSink, max_restarts=-1).remote(config.storage, config.name)
    rendezvous = open_rendezvous(config, in_place)
    try:
        yield sink, rendezvous
    finally:
        if in_place:
            ray.kill(rendezvous)
        ray.kill(sink)


def _run_started(config: RunConfig, work: Schedule, run_dir: RunDir) -> RunStarted:
    return RunStarted(
        name=config.name,
        directory=run_dir.path,
        num_steps=work.num_steps,
        steps_per_epoch=work.train.steps_per_epoch,
        rows_per_epoch=work.train.num_rows - work.train.num_dropped_rows,
        global_batch=config.global_batch,
        num_logical=config.num_logical,
        workers=config.workers,
        threads=config.num_threads,
    )


def _result(run_dir: RunDir, config: RunConfig, outcome: str, stopped_by: int | None = None) -> Result:
    checkpoints = CheckpointStore(run_dir).list()
    newest, best = (checkpoints[-1], best_of(checkpoints, config.best)) if checkpoints else (None, None)
    return Result(
        name=config.name,
        directory=run_dir.path,
        outcome=outcome,
        step=newest.step if newest else 0,
        metrics=dict(newest.manifest.metrics) if newest else {},
        checkpoint=run_dir.child(CHECKPOINTS, newest.name) if newest else "",
        best_checkpoint=run_dir.child(CHECKPOINTS, best.name) if best else "",
        stopped_by=stopped_by,
    )
