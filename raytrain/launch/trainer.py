"""How is a task trained on Ray? Checks, connection, training, and the result.

This file is the story of a run; each part of it is a module of this package. How workers join and leave is in `elasticity`
and `raytrain.elastic`. Runs in the driver.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.train import ControllerError, TrainingFailedError, WorkerGroupError

from raytrain.checkpoint.manifest import best_of
from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.data.loader import describe_reader
from raytrain.elastic.environment import forwarded
from raytrain.elastic.placement import ResourceLease
from raytrain.errors import (
    FourPartError,
    InternalError,
    PoisonRowsError,
    RaytrainError,
    StorageError,
    TaskError,
    WorkersLostError,
)
from raytrain.events.kinds import RunEnded, RunStarted
from raytrain.events.log import EventWriter
from raytrain.launch import cluster, resume, storage
from raytrain.launch.elasticity import RayTrainer, build_trainer, is_in_place, open_rendezvous
from raytrain.launch.lock import RunLock, locked
from raytrain.launch.monitor import NullViewer, RunMonitor, StopRequest, StopTimeout, Viewer, stop_on_signals
from raytrain.launch.schedule import Schedule, build_schedule
from raytrain.plan import Plan
from raytrain.rundir import CHECKPOINTS, RunDir
from raytrain.task import Task
from raytrain.worker.context import RunSpec
from raytrain.worker.hooks import own_transform

CLOSE_LIMIT_S = 15.0
"""Time limit for the shutdown of Ray Train, after the end of the run has been shown."""


@dataclass(frozen=True)
class Result:
    """The outcome of `Trainer.fit`.

    Args:
        name, directory: of the run; the directory is a path on its filesystem.
        outcome: "completed", "stopped", or "already complete" if no steps were left.
        step: number of finished optimizer steps.
        metrics: metrics of the newest checkpoint, by name; empty if it was not evaluated.
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


class Trainer:
    """Trains a task.

    Args:
        task: the task.
        config: settings of the run; by default one worker and one epoch.
        lease: the run's resources in a cluster that it shares with other runs, for trials of a sweep.
    """

    def __init__(self, task: Task, config: RunConfig | None = None, lease: ResourceLease | None = None) -> None:
        self._task, self._config, self._lease = task, config or RunConfig(), lease
        self._name = self._config.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", type(task).__name__).lower()
        self._storage = storage.absolute(self._config.storage)
        self._is_moved = storage.is_moved(self._config.storage)

    @property
    def run_dir(self) -> RunDir:
        """The directory of the run, which may not exist yet.

        Raises:
            StorageError: the path or URI is invalid.
        """
        return storage.locate(self._storage, self._name)

    def fit(self, viewer: Viewer | None = None) -> Result:
        """Trains until the run is complete, or until a signal stops it.

        Args:
            viewer: receives each event.

        Raises:
            FourPartError: settings, data, storage or cluster are unusable; raised before any worker starts.
            TaskError: the task's code raised.
            WorkersLostError: the failure budget `run.max_failures` is spent.
            CheckpointError: the last checkpoint could not be saved.
        """
        viewer = viewer or NullViewer()
        with suppress(StorageError):  # told by `check_writable`, in the words of the setting
            resume.read_metadata(self.run_dir, self._config.resume)  # refused before a directory is made
        run_dir = storage.check_writable(self._storage, self._name)
        with locked(run_dir, lambda text: viewer.status(text, time.time())) as lock:
            return self._fit(run_dir, viewer, lock)

    def _fit(self, run_dir: RunDir, viewer: Viewer, lock: RunLock) -> Result:
        """Trains in a directory that no other driver uses."""
        before = resume.read_metadata(run_dir, self._config.resume)
        config = resume.complete_settings(self._config, self._name, self._storage, before)
        schedule = build_schedule(self._task, config, lambda text: viewer.status(text, time.time()))
        metadata = resume.run_metadata(self._task, config, schedule)
        done = resume.step_to_resume(run_dir)
        resume.check_resumable(run_dir, before, metadata, done if type(self._task).scheduler is Task.scheduler else None)
        if done >= schedule.num_steps:
            return _result(run_dir, config, "already complete")
        if self._is_moved:
            viewer.status(storage.moved_to(run_dir), time.time())
        with stop_on_signals() as request:
            outcome = self._train(config, schedule, metadata, viewer, request, lock)
        return _result(run_dir, config, outcome, request.signal if outcome == "stopped" else None)

    def _train(
        self,
        config: RunConfig,
        schedule: Schedule,
        metadata: dict[str, Any],
        viewer: Viewer,
        request: StopRequest,
        lock: RunLock,
    ) -> str:
        """Trains on Ray. Returns "completed" or "stopped"."""
        run_dir, in_place = lock.run_dir, is_in_place(config, viewer)
        viewer.status("connecting to Ray" if cluster.is_somewhere() else "starting Ray on this machine", time.time())
        with cluster.connected(config.start_timeout_s, cluster.forked(config)):
            request.listen()  # before, there is nothing to save
            accelerator = cluster.choose_accelerator(config.accelerator)
            cluster.check_room(config, cluster.worker_resources(config, accelerator))
            storage.check_shared(run_dir, config.storage)
            resume.write_metadata(run_dir, metadata)
            CheckpointStore(run_dir).delete_incomplete()
            spec = self._spec(config, schedule, accelerator, metadata)
            with _actors(config, in_place) as (event_writer, rendezvous), _scratch_directory() as scratch:
                monitor = RunMonitor(event_writer, rendezvous, viewer, request, config.stop_grace_s)
                monitor.emit(_run_started(self._task, config, schedule, run_dir))
                viewer.status("starting workers", time.time())

                def while_running() -> None:
                    lock.check()
                    monitor.poll()

                trainer = build_trainer(
                    *(spec, event_writer, rendezvous, in_place, scratch),
                    is_complete=lambda: resume.newest_step(run_dir) >= schedule.num_steps,
                    while_running=while_running,
                    lease=self._lease,
                )
                return _run(trainer, run_dir, schedule, monitor)

    def _spec(self, config: RunConfig, schedule: Schedule, accelerator: str, metadata: dict[str, Any]) -> RunSpec:
        return RunSpec(
            task=self._task,
            config=config,
            sources=schedule.sources,
            plans=schedule.plans,
            num_steps=schedule.num_steps,
            environment=forwarded(os.environ, config.forward_env),
            accelerator=accelerator,
            facts=metadata,
        )


def _run(trainer: RayTrainer, run_dir: RunDir, schedule: Schedule, monitor: RunMonitor) -> str:
    """Trains, and shows the end of the run. Returns "completed" or "stopped"."""
    ended, message = "failed", ""
    try:
        try:
            trainer.fit()
        except StopTimeout as timeout:
            message = str(timeout)
        except KeyboardInterrupt:
            message = "a second signal ended the run immediately"
        except SystemExit:  # raised by the viewer
            ended, message = "stopped", "ended by the viewer"
            raise
        except (TrainingFailedError, RaytrainError) as error:
            cause = with_rows(error if isinstance(error, RaytrainError) else cause_of(error), schedule.train)
            message = str(cause)
            raise cause from None
        ended = "completed" if _last_step(run_dir, monitor) >= schedule.num_steps else "stopped"
    finally:
        monitor.finish(RunEnded(outcome=ended, step=_last_step(run_dir, monitor), message=message, time=time.time()))
        trainer.close(CLOSE_LIMIT_S)
    return ended


def _last_step(run_dir: RunDir, monitor: RunMonitor) -> int:
    """Finished steps of the newest checkpoint; of the one that was reported last if the storage cannot be read."""
    try:
        return resume.newest_step(run_dir)
    except StorageError:
        return monitor.saved_step


def cause_of(error: TrainingFailedError) -> RaytrainError:
    """The cause of a failed run; if several ranks failed, errors of the task's code take precedence."""
    if isinstance(error, WorkerGroupError):
        for kind in (TaskError, FourPartError, WorkersLostError, RaytrainError):
            for cause in error.worker_failures.values():
                if isinstance(cause, kind):
                    return cause
    if isinstance(error, ControllerError) and isinstance(error.controller_failure, RaytrainError):
        return error.controller_failure
    return InternalError(str(error))


def with_rows(error: RaytrainError, plan: Plan) -> RaytrainError:
    """The error, with row numbers if it is a PoisonRowsError; the controller knows only logical workers."""
    if not isinstance(error, PoisonRowsError):
        return error
    rows = [int(row) for logical in error.logical for row in plan.row_ids(error.step, logical)]
    return PoisonRowsError(error.step, error.logical, error.cause, tuple(rows))


@contextmanager
def _scratch_directory() -> Iterator[str]:
    """Ray Train requires a storage path of its own; nothing important is written there."""
    path = tempfile.mkdtemp(prefix="raytrain-")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _actors(config: RunConfig, in_place: bool) -> Iterator[tuple[Any, Any]]:
    """The event writer and the rendezvous of a run; killed after the block."""
    event_writer = cluster.pinned(EventWriter, max_restarts=-1).remote(config.storage, config.name)
    rendezvous = open_rendezvous(config, in_place)
    try:
        yield event_writer, rendezvous
    finally:
        if in_place:
            ray.kill(rendezvous)
        ray.kill(event_writer)


def _run_started(task: Task, config: RunConfig, schedule: Schedule, run_dir: RunDir) -> RunStarted:
    return RunStarted(
        name=config.name,
        directory=run_dir.path,
        num_steps=schedule.num_steps,
        steps_per_epoch=schedule.train.steps_per_epoch,
        rows_per_epoch=schedule.train.num_rows - schedule.train.num_dropped_rows,
        global_batch=config.global_batch,
        num_logical=config.num_logical,
        workers=config.workers,
        threads=config.num_threads,
        readers={
            name: describe_reader(config.reader, source, own_transform(task)) for name, source in schedule.sources.items()
        },
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
