"""Ray Train's notion of a group, where each worker has a placement group of its own. Runs in the controller's thread."""

from __future__ import annotations

import ray

from raytrain.elastic.internals import (
    DistributedContext,
    PlacementGroupHandle,
    WorkerGroupState,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)


class NoPlacementGroup(PlacementGroupHandle):
    """Ray Train wants one placement group for all workers; here each worker has its own."""

    placement_group = property(lambda self: None)

    def ready(self) -> None:
        return None

    def wait(self, timeout_seconds: float = 30) -> bool:
        return True

    def shutdown(self) -> None:
        return None


class LoneWorkers(WorkerGroupState):
    """Ends at once: the workers have nothing left to do when Ray Train shuts the group down."""

    def shutdown(self) -> None:
        for worker in self.workers:
            ray.kill(worker.actor)


def context_of(serial: int, max_workers: int) -> DistributedContext:
    """Ranks change with each generation, so Ray Train is given the worker's serial number instead."""
    return DistributedContext(world_rank=serial, world_size=max_workers, local_rank=0, local_world_size=1, node_rank=0)


class GivenUp(Exception):
    """A worker was silent or stuck for too long, and was killed."""


def is_lost(error: BaseException | None) -> bool:
    """Whether a worker's process is gone or silent, rather than its code having raised."""
    return isinstance(error, WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError)
