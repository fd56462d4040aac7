"""Ray Train's controller and trainer, with the few decisions changed that would restart a group.

The controller polls the elastic worker group and ends the run when it has finished or when user code raised; losses never
reach it. `ElasticTrainer` is a `TorchTrainer`; it runs in the driver's process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ray
from ray.train.torch import TorchConfig, TorchTrainer

from raytrain.elastic.internals import (
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

POLL_EVERY_S = 0.5
LOOK_EVERY_S = 0.25


class _NoBackend(Backend):
    """The workers form their own process groups, one per generation."""


class NoBackendTorchConfig(TorchConfig):
    """Keeps Ray Train from forming a process group of its own."""

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
    """Runs as an actor on the driver's node."""

    worker_group_cls = ElasticWorkerGroup

    def __init__(self, **kwargs: Any) -> None:
        os.environ[ENABLE_PREEMPTION_WATCHER_ENV_VAR] = "0"
        super().__init__(**kwargs)
        self._health_check_interval_s = POLL_EVERY_S

    @staticmethod
    def _is_training_succeeded(worker_group_status: WorkerGroupPollStatus) -> bool:
        """A group without workers waits for some; it has not finished."""
        return bool(worker_group_status.worker_statuses) and TrainController._is_training_succeeded(worker_group_status)


class ElasticTrainer(TorchTrainer):
    """A `TorchTrainer` whose `fit` calls `while_running` several times a second.

    Args:
        while_running: called in the driver's main thread while the run goes on; may raise to end the run.
        All others are those of `TorchTrainer`.
    """

    def __init__(self, *args: Any, while_running: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, torch_config=NoBackendTorchConfig(backend="gloo"), **kwargs)
        self._while_running = while_running

    def _create_default_callbacks(self) -> list[Any]:
        """None of Ray's: they form process groups, shard datasets and change directories."""
        return []

    def _initialize_and_run_controller(self, **kwargs: Any) -> Any:
        kwargs["scaling_policy"] = StartOnce(self.scaling_config)
        kwargs["failure_policy"] = EndOnErrors(self.run_config.failure_config)
        here = {ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
        controller = ray.remote(num_cpus=0, label_selector=here)(ElasticController).remote(**kwargs)
        try:
            running = controller.run.remote()
            while not ray.wait([running], timeout=LOOK_EVERY_S)[0]:
                self._while_running()
            ray.get(running)
            return ray.get(controller.get_result.remote())
        finally:
            ray.kill(controller)
