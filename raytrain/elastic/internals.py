"""All internals of Ray Train 2.60 that raytrain uses, in one place.

No other module may import `ray.train.v2._internal` (ruff checks it). `contract` checks each name and signature that is used,
before a run imports this file.
"""

from __future__ import annotations

from ray._private.state import state
from ray.train.backend import Backend
from ray.train.v2._internal.constants import (
    ENABLE_CONTROLLER_STRUCTURED_LOGGING_ENV_VAR,
    ENABLE_PREEMPTION_WATCHER_ENV_VAR,
)
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError
from ray.train.v2._internal.execution.context import DistributedContext
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup, WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupContext, WorkerGroupState
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker
from ray.train.v2._internal.util import bundle_to_remote_args

__all__ = [
    "ENABLE_CONTROLLER_STRUCTURED_LOGGING_ENV_VAR",
    "ENABLE_PREEMPTION_WATCHER_ENV_VAR",
    "Backend",
    "DistributedContext",
    "FailureDecision",
    "FailurePolicy",
    "NoopDecision",
    "PlacementGroupHandle",
    "RayTrainWorker",
    "ReplicaGroup",
    "ResizeDecision",
    "ScalingPolicy",
    "TrainController",
    "Worker",
    "WorkerGroup",
    "WorkerGroupContext",
    "WorkerGroupPollStatus",
    "WorkerGroupState",
    "WorkerHealthCheckFailedError",
    "WorkerHealthCheckTimeoutError",
    "bundle_to_remote_args",
]


def draining_nodes() -> dict[str, float]:
    """Draining nodes by id, with their deadlines in Unix seconds; 0 if a deadline is not known."""
    return {node: deadline_ms / 1000 for node, deadline_ms in state.get_draining_nodes().items()}
