"""One worker in Ray Train's terms: from its slot to a running training function, and how its end shows.

Each worker has a slot of its own and a serial number instead of a rank, since ranks change with each generation. The
controller polls a starting worker; nothing here blocks. Runs in the controller's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError

from raytrain.elastic.controller_config import worker_name
from raytrain.elastic.internals import (
    DistributedContext,
    PlacementGroupHandle,
    RayTrainWorker,
    Worker,
    WorkerGroupState,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
    bundle_to_remote_args,
)
from raytrain.elastic.placement import Slot


class StartFailed(Exception):
    """The process of a worker died before its training function ran; `preempted` if its node was taken away."""

    def __init__(self, message: str, preempted: bool) -> None:
        super().__init__(message, preempted)
        self.preempted = preempted

    def __str__(self) -> str:
        return str(self.args[0])


class Evicted(Exception):
    """A worker was silent or stuck for too long, and was killed."""


def is_lost(error: BaseException | None) -> bool:
    """Whether a worker's process is gone or silent, rather than its code having raised."""
    return isinstance(error, WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError)


class ElasticWorker:
    """A worker from the request for its slot until the slot is released.

    Args:
        serial: number of the worker in the run.
        resources: of the worker, {"CPU": 1.0}.
        runtime_env: of its actor.
        slot: where it runs.
        timeout_s: what its process may take to start, once the slot is placed.
        batch: equal for workers that were requested together.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        serial: int,
        resources: dict[str, float],
        runtime_env: dict[str, str],
        slot: Slot,
        timeout_s: float,
        batch: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.serial, self._resources, self._slot, self._timeout_s, self._clock = serial, resources, slot, timeout_s, clock
        self.name, self.batch, self._runtime_env = worker_name(serial), batch, runtime_env
        self._placed_at = 0.0
        self._actor: Any = None
        self._start_calls: list[Any] = []

    @property
    def is_placed(self) -> bool:
        return self._actor is not None

    @property
    def is_extra(self) -> bool:
        """Whether other runs can use the slot once it is released."""
        return not self._slot.is_reserved

    def try_place(self) -> bool:
        """Starts the process if the slot has just been placed; returns whether it has."""
        if self._actor is not None or not self._slot.is_placed:
            return False
        remote = ray.remote(**bundle_to_remote_args(self._resources))(RayTrainWorker)
        self._actor = remote.options(scheduling_strategy=self._slot.strategy, runtime_env=self._runtime_env).remote()
        self._placed_at = self._clock()
        return True

    def launch(self, train_context: dict[str, Any], train_function: Any) -> None:
        """Sends the three calls that start the training function; an actor runs them in order."""
        self._start_calls = [
            self._actor.get_metadata.remote(),
            self._actor.init_train_context.remote(**train_context),
            self._actor.run_train_fn.remote(train_function),
        ]

    def poll(self) -> Worker | None:
        """Ray Train's worker, once the training function runs.

        Raises:
            StartFailed: its process died on the way, or takes too long.
        """
        if not self._start_calls:
            return None
        done, _ = ray.wait(self._start_calls, num_returns=len(self._start_calls), timeout=0)
        if len(done) < len(self._start_calls):
            if self._clock() - self._placed_at > self._timeout_s:
                raise StartFailed(f"its process did not start within {self._timeout_s:g} s", preempted=False)
            return None
        try:
            metadata, *_ = ray.get(self._start_calls)
        except RayActorError as error:
            raise StartFailed(str(error), getattr(error, "preempted", False)) from error
        return Worker(self._actor, metadata, self._resources)

    def release(self) -> None:
        """Kills the process and releases the slot."""
        if self._actor is not None:
            ray.kill(self._actor)
        self._slot.release()


class WorkersState(WorkerGroupState):
    """Ray Train's state of the group; shutting it down kills at once, since the workers have nothing left to do."""

    def shutdown(self) -> None:
        for worker in self.workers:
            ray.kill(worker.actor)


class NoPlacementGroup(PlacementGroupHandle):
    """Ray Train wants one placement group for all workers; here each worker has its own."""

    placement_group = property(lambda self: None)

    def ready(self) -> None:
        return None

    def wait(self, timeout_seconds: float = 30) -> bool:
        return True

    def shutdown(self) -> None:
        return None


def distributed_context(serial: int, max_workers: int) -> DistributedContext:
    """Ranks change with each generation, so Ray Train gets the worker's serial number instead."""
    return DistributedContext(world_rank=serial, world_size=max_workers, local_rank=0, local_world_size=1, node_rank=0)
