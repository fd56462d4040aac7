"""The `TorchTrainer` of an elastic run, and Ray Train's controller with the few decisions changed that restart a group.

The controller polls the elastic worker group and ends the run when it has finished or when user code raised; losses never
reach it. Ray Train makes it an actor. Here it runs in a thread of the driver, on whose end the run ends anyway: one process
less that can die, that takes CPU time from the workers, and that must start before they do.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from ray.train.backend import BackendConfig
from ray.train.torch import TorchTrainer

from raytrain.elastic.environment import environment_set
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

POLL_EVERY_S = 0.75  # a drain is noticed within a second; each poll takes CPU time from workers on the same machine
POLL_EVERY_CHANGING_S = 0.2  # while workers come or go
WATCH_EVERY_S = 0.25
CANCEL_TIMEOUT_S = 2.0
"""What the controller may take to end when it is cancelled."""
CONTROLLER_ENVIRONMENT = {ENABLE_PREEMPTION_WATCHER_ENV_VAR: "0", ENABLE_CONTROLLER_STRUCTURED_LOGGING_ENV_VAR: "0"}
"""Environment variables with which the controller is made: none of Ray's own watchers and logs."""


class _NoBackend(Backend):
    """The workers form their own process groups, one per generation."""


class NoBackendConfig(BackendConfig):
    """Keeps Ray Train from forming a process group of its own; takes the place of a `TorchConfig`."""

    backend = "gloo"

    @property
    def backend_cls(self) -> type[Backend]:
        return _NoBackend


class NoRetries(FailurePolicy):
    """An error that reaches the controller is not retried: lost workers never do."""

    def make_decision(self, training_failed_error: Exception) -> FailureDecision:
        return FailureDecision.RAISE


class StartOnce(ScalingPolicy):
    """Starts the group; it grows and shrinks by itself, and requests resources through its placement groups."""

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
    """Ray Train's control loop over an elastic worker group; make it with `CONTROLLER_ENVIRONMENT` set."""

    worker_group_cls = ElasticWorkerGroup

    async def _poll_workers(self) -> WorkerGroupPollStatus:
        group = self.get_worker_group()
        is_changing = isinstance(group, ElasticWorkerGroup) and group.is_changing
        self._health_check_interval_s = POLL_EVERY_CHANGING_S if is_changing else POLL_EVERY_S
        return await super()._poll_workers()

    def release(self) -> None:
        """Releases the workers that are left; from any thread, after the control loop."""
        group = self.get_worker_group()
        if isinstance(group, ElasticWorkerGroup):
            group.release()

    @staticmethod
    def _is_training_succeeded(worker_group_status: WorkerGroupPollStatus) -> bool:
        """A group without workers waits for some; it has not finished."""
        return bool(worker_group_status.worker_statuses) and TrainController._is_training_succeeded(worker_group_status)


class ElasticTrainer(TorchTrainer):
    """A `TorchTrainer` whose `fit` calls `while_running` several times a second.

    Args:
        while_running: called in the thread that called `fit` while the run goes on; may raise to end the run.
        All others are those of `TorchTrainer`.
    """

    def __init__(self, *args: Any, while_running: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, torch_config=NoBackendConfig(), **kwargs)
        self._while_running = while_running
        self._thread: threading.Thread | None = None

    def close(self, timeout_s: float) -> None:
        """Waits until the controller's thread has ended, since Ray must not be shut down under it."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _create_default_callbacks(self) -> list[Any]:
        """None of Ray's: they form process groups, shard datasets and change directories."""
        return []

    def _initialize_and_run_controller(self, **kwargs: Any) -> Any:
        kwargs["scaling_policy"] = StartOnce(self.scaling_config)
        kwargs["failure_policy"] = NoRetries(self.run_config.failure_config)
        with environment_set(CONTROLLER_ENVIRONMENT):
            controller = ElasticController(**kwargs)
        logging.getLogger("ray.train.v2").setLevel(logging.CRITICAL)  # it would log errors that the run reports itself
        try:
            with _in_thread(controller.run()) as (self._thread, running):
                while not concurrent.futures.wait([running], WATCH_EVERY_S).done:
                    self._while_running()
                running.result()
            return controller.get_result()
        finally:
            controller.release()


@contextlib.contextmanager
def _in_thread(
    work: Coroutine[Any, Any, None],
) -> Iterator[tuple[threading.Thread, concurrent.futures.Future[None]]]:
    """Runs a coroutine in a thread of its own, and cancels it at the end of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="controller", daemon=True)
    thread.start()
    running = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        yield thread, running
    finally:
        running.cancel()
        loop.call_soon_threadsafe(loop.call_soon, loop.stop)  # one turn later, so that the cancelled work has ended
        thread.join(CANCEL_TIMEOUT_S)
        if not thread.is_alive():
            loop.close()
