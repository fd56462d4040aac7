"""Ray Train's controller, with the few decisions changed that would restart a group.

It polls the elastic worker group and ends the run when it has finished or when user code raised; losses never reach it.
Runs in a thread of the driver.
"""

from __future__ import annotations

from typing import Any

from ray.train.backend import BackendConfig

from raytrain.elastic.internals import (
    ENABLE_CONTROLLER_STRUCTURED_LOGGING_ENV_VAR,
    ENABLE_PREEMPTION_WATCHER_ENV_VAR,
    Backend,
    FailureDecision,
    FailurePolicy,
    NoopDecision,
    ResizeDecision,
    ScalingPolicy,
    TrainController,
    WorkerGroupPollStatus,
)
from raytrain.elastic.worker_group import ElasticWorkerGroup

POLL_EVERY_S = 0.75  # a drain is to be noticed within a second; each poll takes time from workers on the same machine
POLL_SOON_S = 0.2  # while workers come or go
QUIET = {ENABLE_PREEMPTION_WATCHER_ENV_VAR: "0", ENABLE_CONTROLLER_STRUCTURED_LOGGING_ENV_VAR: "0"}
"""Environment variables with which the controller is made: nothing of Ray's own beside it."""


class _NoBackend(Backend):
    """The workers form their own process groups, one per generation."""


class NoBackendConfig(BackendConfig):
    """Keeps Ray Train from forming a process group of its own; takes the place of a `TorchConfig`."""

    backend = "gloo"

    @property
    def backend_cls(self) -> type[Backend]:
        return _NoBackend


class EndOnErrors(FailurePolicy):
    """What reaches the controller as an error is not to be retried: lost workers never do."""

    def make_decision(self, training_failed_error: Exception) -> FailureDecision:
        return FailureDecision.RAISE


class StartOnce(ScalingPolicy):
    """Starts the group; it grows and shrinks by itself, and asks for resources through its placement groups."""

    def make_decision_for_non_running_worker_group(self) -> ResizeDecision:
        return ResizeDecision(
            num_workers=self.scaling_config.num_workers,
            resources_per_worker=self.scaling_config._resources_per_worker_not_none,
        )

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> NoopDecision:
        return NoopDecision()

    def _get_num_workers_for_resource_request(self) -> int:
        return int(self.scaling_config.num_workers)

    def after_controller_start(self, train_run_context: Any) -> None:
        """Does without Ray's coordinator of resource requests."""


class ElasticController(TrainController):
    """Ray Train's control loop over an elastic worker group; make it with the variables `QUIET` set."""

    worker_group_cls = ElasticWorkerGroup

    async def _poll_workers(self) -> WorkerGroupPollStatus:
        group = self.get_worker_group()
        is_changing = isinstance(group, ElasticWorkerGroup) and group.is_changing
        self._health_check_interval_s = POLL_SOON_S if is_changing else POLL_EVERY_S
        return await super()._poll_workers()

    def let_go(self) -> None:
        """Ends what is left of the workers; from any thread, after the control loop."""
        group = self.get_worker_group()
        if isinstance(group, ElasticWorkerGroup):
            group.let_go()

    @staticmethod
    def _is_training_succeeded(worker_group_status: WorkerGroupPollStatus) -> bool:
        """A group without workers waits for some; it has not finished."""
        return bool(worker_group_status.worker_statuses) and TrainController._is_training_succeeded(worker_group_status)
