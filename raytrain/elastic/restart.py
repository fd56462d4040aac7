"""Restart mode: each change of workers restarts all of them from the newest checkpoint. When, and with how many workers?

A lost worker ends an attempt; when there is room for more workers, the group is asked to save and to end. So rows, steps
and results are those of every run. A draining node is noticed when it goes, or when Ray Train ends the attempt; neither
counts as a failure. Uses public Ray only. Runs in the driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from raytrain.elastic.attempt import REPLY_TIMEOUT_S, Attempt, AttemptFactory, AttemptStatus, Loss, first_line
from raytrain.elastic.controller_config import ControllerConfig
from raytrain.elastic.membership import FailureBudget, MinWorkersGuard, PoisonRows
from raytrain.elastic.placement import PlacementRequests
from raytrain.errors import (
    CheckpointError,
    PoisonRowsError,
    RaytrainError,
    TaskError,
    WorkersLostError,
)
from raytrain.events.kinds import Event, WorkerDrained, WorkerLost
from raytrain.plan import logical_workers_of
from raytrain.rendezvous.state import NO_STATE

POLL_EVERY_S = 0.25
START_SETTLE_S = 3.0
"""The room must be unchanged for this time before fewer than the most workers start; Ray frees an ended group in less."""
GROW_SETTLE_S = 10.0
"""The same before a group is ended for a larger one."""


class StopRelay:
    """Takes the place of the one rendezvous of other runs: passes a stop request on to the attempt that runs."""

    def __init__(self) -> None:
        self.is_requested = False
        self.attempt: Attempt | None = None

    @property
    def stop(self) -> StopRelay:
        return self

    def remote(self) -> None:
        self.is_requested = True
        if self.attempt is not None:
            self.attempt.rendezvous.stop.remote()


class RestartTrainer:
    """Trains in as many attempts as it takes.

    Args:
        factory: starts attempts.
        config: of the run; its rendezvous is the `StopRelay`.
        is_complete: whether the newest checkpoint is that of the last step.
        while_running: called several times a second in the thread that called `fit`; may raise to end the run.
    """

    def __init__(
        self,
        factory: AttemptFactory,
        config: ControllerConfig,
        is_complete: Callable[[], bool],
        while_running: Callable[[], None],
    ) -> None:
        self._factory, self._config, self._is_complete, self._while_running = factory, config, is_complete, while_running
        self._relay: StopRelay = config.rendezvous
        self._requests = PlacementRequests(dict(factory.resources))
        self._budget, self._poison_rows = FailureBudget(config.max_failures), PoisonRows()
        self._guard = MinWorkersGuard(config, dict(factory.resources), self._emit)
        self._num_workers = self._generation = 0
        self._max_step = self._report_below = NO_STATE
        """The most finished steps of all attempts; the same after a failure, so that the step of a next one is known."""

    def fit(self) -> None:
        """Returns when the run is complete or stopped.

        Raises:
            RaytrainError: a train function raised it.
            ResourceError: there was no room for `min_workers` for too long.
            WorkersLostError: the failure budget is spent.
            PoisonRowsError: processes died in the same step, with the same rows.
        """
        try:
            while num_workers := self._wait_for_room():
                first, self._num_workers = self._num_workers, self._num_workers + num_workers
                attempt = self._factory.start(self._config.writer, num_workers, first, self._report_below, self._generation)
                self._relay.attempt = attempt
                try:
                    self._watch(attempt)
                    if self._is_last(attempt):
                        return
                finally:
                    self._relay.attempt = None
                    attempt.close()
        finally:
            self._requests.request(0)

    def close(self, timeout_s: float) -> None:
        """Nothing is left to wait for."""

    def _wait_for_room(self) -> int:
        """The number of workers of the next attempt; 0 if the run is to stop."""
        low, high = self._config.min_workers, self._config.max_workers
        self._requests.request(high)
        while not self._relay.is_requested:
            now = time.monotonic()
            num_placed, steady_s = self._requests.check(now)
            if num_placed >= high or (num_placed >= low and steady_s >= START_SETTLE_S):
                self._requests.request(0)
                return num_placed
            if error := self._guard.check(0, num_placed, now):
                raise error
            self._rest()
        return 0

    def _watch(self, attempt: Attempt) -> None:
        """Returns when the attempt has finished or is broken, or does not start in time."""
        num_workers, started = len(attempt.names), time.monotonic()
        while not attempt.is_over:
            attempt.poll()
            now = time.monotonic()
            if len(attempt.status.started) == num_workers:  # before that, requested slots could take the group's own
                self._requests.request(self._config.max_workers - num_workers)
                self._guard.check(num_workers, num_workers, now)
            elif now - started > self._config.slow_timeout_s:
                return
            num_placed, steady_s = self._requests.check(now)
            if attempt.is_to_stop or (num_placed and steady_s >= GROW_SETTLE_S and attempt.status.step > 0):
                attempt.stop()
            self._rest()

    def _is_last(self, attempt: Attempt) -> bool:
        """Reports the end of an attempt and counts its failure; returns whether the run is over."""
        for _ in range(2):  # the first status may be from before the end
            attempt.poll(REPLY_TIMEOUT_S)
        status, error = attempt.status, attempt.error
        self._max_step, self._generation = max(self._max_step, status.step), max(self._generation, status.generation)
        self._raise_own_error(attempt)
        if self._relay.is_requested or self._is_complete() or (attempt.has_finished and not attempt.is_to_stop):
            return True
        reason = first_line(error) if error else f"no start within {self._config.slow_timeout_s:g} s"
        has_failed = not (attempt.has_finished or hasattr(error, "preemption_info"))
        lost = (status.lost or dict.fromkeys(status.started, Loss(reason))) if has_failed else {}
        for worker, (node, pid) in status.started.items():
            left = WorkerDrained(worker=worker, node=node, pid=pid)
            is_lost = worker in lost
            self._emit(WorkerLost(worker=worker, node=node, pid=pid, reason=lost[worker].reason) if is_lost else left)
        self._report_below = self._max_step if has_failed else NO_STATE
        if has_failed and not (lost and all(loss.preempted for loss in lost.values())):
            self._count_failure(status, lost, reason)
        return False

    def _raise_own_error(self, attempt: Attempt) -> None:
        """Raises the error of a train function, the task's own first."""
        raised = [*attempt.status.finished.values(), *getattr(attempt.error, "worker_failures", {}).values()]
        own = [error for error in raised if isinstance(error, RaytrainError)]
        if attempt.is_to_stop:  # without that, nobody would have had to save
            own = [error for error in own if not isinstance(error, CheckpointError)]
        if own:
            raise min(own, key=lambda error: not isinstance(error, TaskError))

    def _count_failure(self, status: AttemptStatus, lost: Mapping[str, Loss], reason: str) -> None:
        """Raises if this failure was one too many."""
        for worker, loss in lost.items():
            reason = loss.reason
            if loss.preempted or loss.evicted or worker not in status.members:
                continue
            step, num_ranks = max(0, status.step), len(status.members)
            assigned = logical_workers_of(status.members.index(worker), num_ranks, self._config.num_logical)
            if poison := self._poison_rows.record_death(step, frozenset(assigned)):
                raise PoisonRowsError(step, tuple(sorted(poison)), loss.reason)
        if not self._budget.spend(max(0, self._max_step), event=self._num_workers):
            raise WorkersLostError(
                f"the group was lost {self._budget.failures} times in a row at step {max(0, self._max_step)}, without a "
                f"finished step in between (run.max_failures = {self._budget.max_failures}); the last time: {reason}"
            )

    def _emit(self, event: Event) -> None:
        self._config.writer.append.remote([event])

    def _rest(self) -> None:
        self._while_running()
        time.sleep(POLL_EVERY_S)
