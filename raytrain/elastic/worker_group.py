"""A Ray Train worker group whose workers come and go one by one, while the others keep running.

It starts empty; every worker, the first ones too, is started here and joins through the rendezvous. A lost worker is
dropped and requested again inside the poll, so that Ray Train's controller stays in its running state and restarts nothing.
How the workers regroup is decided by the rendezvous. Runs in the controller's thread.
"""

from __future__ import annotations

import time
from typing import Any

from raytrain.elastic.controller_config import CONTROLLER_CONFIG, ControllerConfig
from raytrain.elastic.internals import ReplicaGroup, Worker, WorkerGroup, WorkerGroupPollStatus, draining_nodes
from raytrain.elastic.membership import (
    Allocation,
    FailureBudget,
    MinWorkersGuard,
    PoisonRows,
    RendezvousClient,
    num_to_request,
    surplus,
)
from raytrain.elastic.placement import Slots
from raytrain.elastic.worker import (
    ElasticWorker,
    Evicted,
    NoPlacementGroup,
    StartFailed,
    WorkersState,
    distributed_context,
    is_lost,
)
from raytrain.errors import PoisonRowsError, ResourceError, WorkersLostError
from raytrain.events.kinds import Event, WorkerDrained, WorkerDraining, WorkerLost, WorkerStarting

SILENT_S = 120.0
"""A worker whose process has not replied to Ray for this long, beyond what its slowest activity may take, is lost if its
heartbeats did not show it before."""
STARTING_S = 10.0
"""By then a requested worker has started, or waits for room."""


class ElasticWorkerGroup(WorkerGroup):
    """See the module; `ControllerConfig` in the train loop's configuration has the range and the connections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config: ControllerConfig = self._train_run_context.train_loop_config[CONTROLLER_CONFIG]
        self._config = config
        self._rendezvous = RendezvousClient(config.rendezvous, config.num_logical)
        self._budget, self._poison_rows = FailureBudget(config.max_failures), PoisonRows()
        self._resources: dict[str, float] = self._worker_group_context.resources_per_worker
        self._runtime_env = self._train_run_context.run_config.worker_runtime_env
        self._guard = MinWorkersGuard(config, self._resources, self._emit)
        self._too_few: ResourceError | None = None
        """With what the run ends once the remaining workers have saved their state."""
        self._slots = Slots(self._resources, config.lease)
        self._allocation = Allocation(config.lease, config.min_workers, config.max_workers, self._resources)
        self._joining: list[ElasticWorker] = []
        self._running: list[ElasticWorker] = []
        """One for each worker of Ray Train's group, in the same order."""
        self._draining: set[str] = set()
        """Workers whose nodes are about to go away, or whose slots other runs need."""
        self._num_requested = 0
        self._requested_at = 0.0
        """When a worker was requested last, in monotonic seconds."""
        self._worker_health_check_timeout_s = SILENT_S + config.slow_timeout_s  # a call of the task may hold the GIL

    def _start_impl(self, worker_group_state_builder: Any) -> None:
        self._set_workers([])
        self._request_workers(num_finished=0)
        self._start_workers()

    def poll_status(self, timeout: float | None = None) -> WorkerGroupPollStatus:
        """Polls all workers; replaces lost ones, which are no errors.

        Raises:
            ResourceError: there was no room for the smallest group for too long.
            WorkersLostError: too many were lost in a row.
            PoisonRowsError: processes died in the same step, with the same rows.
        """
        self._rendezvous.poll()
        self._allocation.poll(len(self._running), self._rendezvous.step)
        self._start_workers()
        statuses = dict(enumerate(self._poll_workers_and_collect_errors(timeout))) if self._running else {}
        self._drain_nodes()
        gone = self._remove_lost(statuses)
        gone |= self._release_drained({rank: status for rank, status in statuses.items() if rank not in gone})
        self._drop(gone)
        statuses = {rank: status for rank, status in statuses.items() if rank not in gone}
        num_finished = sum(not s.running and s.error is None for s in statuses.values())
        self._release_surplus(num_finished)
        self._request_workers(num_finished)
        self._check_min_workers(is_over=num_finished == len(statuses))
        self._latest_poll_status = WorkerGroupPollStatus(
            worker_statuses=dict(enumerate(statuses.values())),
            worker_rank_to_replica_group_rank=self._worker_rank_to_replica_group_rank,
        )
        return self._latest_poll_status

    def shutdown(self) -> None:
        try:
            super().shutdown()
        finally:
            self.release()

    def release(self) -> None:
        """Kills all workers and releases their resources; may be called again."""
        for worker in [*self._joining, *self._running]:
            worker.release()
        self._joining, self._running = [], []
        self._allocation.leave()

    @property
    def is_changing(self) -> bool:
        """Whether workers come or go, so that the controller should poll more often."""
        return bool(self._draining) or time.monotonic() - self._requested_at < STARTING_S

    # Joining

    def _request_workers(self, num_finished: int) -> None:
        num_staying, num_joining, batch = len(self._staying()), len(self._joining), self._num_requested
        for _ in range(num_to_request(num_staying, num_joining, num_finished, self._num_wanted)):
            how = self._resources, self._runtime_env, self._slots.request(), self._config.slow_timeout_s
            self._joining.append(ElasticWorker(self._num_requested, *how, batch))
            self._num_requested += 1
            self._requested_at = time.monotonic()

    @property
    def _num_wanted(self) -> int:
        return self._allocation.num_workers + self._config.spares

    def _staying(self) -> list[ElasticWorker]:
        return [worker for worker in self._running if worker.name not in self._draining]

    def _start_workers(self) -> None:
        """Advances each joining worker as far as possible now."""
        for joining in list(self._joining):
            if joining.try_place():
                self._rendezvous.expect(joining.name)
                joining.launch(self._train_context_for(joining), self._worker_group_context.train_fn_ref)
            try:
                worker = joining.poll()
            except StartFailed as error:
                self._joining.remove(joining)
                joining.release()
                self._handle_failure(joining, None, error)
                continue
            if worker is not None:
                self._joining.remove(joining)
                self._add(joining, worker)

    def _add(self, started: ElasticWorker, worker: Worker) -> None:
        worker.distributed_context = distributed_context(started.serial, self._config.max_workers)
        self._running.append(started)
        self._set_workers([*self.get_workers(), worker])
        self._emit(WorkerStarting(worker=started.name, node=worker.metadata.node_ip, pid=worker.metadata.pid))

    def _train_context_for(self, worker: ElasticWorker) -> dict[str, Any]:
        return {
            "train_run_context": self._train_run_context,
            "distributed_context": distributed_context(worker.serial, self._config.max_workers),
            "synchronization_actor": None,  # serves `ray.train.report`, which a task does not call
            "storage_context": self._storage_context,
            "worker_callbacks": self._worker_callbacks_to_propagate,
            "controller_actor": None,  # likewise
        }

    # Leaving

    def _remove_lost(self, statuses: dict[int, Any]) -> set[int]:
        """Releases workers whose process is gone or that were evicted, and handles each failure; returns their ranks."""
        if any(is_lost(status.error) for status in statuses.values()):
            self._rendezvous.refresh()  # was it killed for its silence, and in which step is the run?
        lost = set()
        for rank, (running, worker) in enumerate(zip(self._running, self.get_workers(), strict=True)):
            reason, error = self._rendezvous.evicted.get(running.name), statuses[rank].error
            if reason or is_lost(error):
                lost.add(rank)
                running.release()
                cause = Evicted(reason) if reason else getattr(error, "health_check_failure", error)
                self._handle_failure(running, worker, cause)
        return lost

    def _drain_nodes(self) -> None:
        deadlines = draining_nodes()
        for running, worker in zip(self._running, self.get_workers(), strict=True):
            node = worker.metadata.node_id
            if node in deadlines and running.name not in self._draining:
                self._drain(running, worker, deadline=deadlines[node])

    def _release_surplus(self, num_finished: int) -> None:
        """Gives back what other runs need: a joining worker at once, a running one after its step."""
        limits = self._allocation.min_workers, self._num_wanted
        for worker in surplus(self._staying(), self._joining, num_finished, *limits):
            if worker in self._joining:
                self._joining.remove(worker)
                worker.release()
                self._rendezvous.withdraw(worker.name)
                continue
            self._drain(worker, self.get_workers()[self._running.index(worker)], reason="other trials need its slot")

    def _drain(self, running: ElasticWorker, worker: Worker, deadline: float = 0.0, reason: str = "") -> None:
        """Marks a worker that should leave after its step."""
        self._draining.add(running.name)
        self._emit(WorkerDraining(worker=running.name, node=worker.metadata.node_ip, deadline=deadline, reason=reason))

    def _release_drained(self, statuses: dict[int, Any]) -> set[int]:
        """Asks draining workers to leave and releases those that have left; returns their ranks."""
        left = set()
        for rank, status in statuses.items():
            running, metadata = self._running[rank], self.get_workers()[rank].metadata
            if running.name not in self._draining:
                continue
            has_ended = not status.running and status.error is None
            if has_ended and running.name not in self._rendezvous.drained:
                self._rendezvous.refresh()
            if self._rendezvous.drain(running.name) or (has_ended and running.name in self._rendezvous.drained):
                left.add(rank)
                running.release()
                self._emit(WorkerDrained(worker=running.name, node=metadata.node_ip, pid=metadata.pid))
        return left

    def _handle_failure(self, failed: ElasticWorker, worker: Worker | None, cause: BaseException) -> None:
        """Reports the loss. Raises when the failure budget is spent; drains and preemptions do not count."""
        self._rendezvous.report_lost(failed.name)
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        node, pid = (worker.metadata.node_ip, worker.metadata.pid) if worker else ("", 0)
        self._emit(WorkerLost(worker=failed.name, node=node, pid=pid, reason=reason))
        if getattr(cause, "preempted", False) or failed.name in self._draining:
            return
        step, assigned = self._rendezvous.step, self._rendezvous.assigned(failed.name)
        if assigned and not isinstance(cause, Evicted) and (poison := self._poison_rows.record_death(step, assigned)):
            raise PoisonRowsError(step, tuple(sorted(poison)), reason)
        generation = self._rendezvous.lost_in(failed.name)
        event = ("start", failed.batch) if generation is None else ("generation", generation)
        if not self._budget.spend(step, event):
            raise WorkersLostError(
                f"workers were lost {self._budget.failures} times in a row at step {step}, without a finished step in "
                f"between (run.max_failures = {self._budget.max_failures}); the last one: {reason}"
            )

    def _drop(self, ranks: set[int]) -> None:
        if not ranks:
            return
        kept = [rank for rank in range(len(self._running)) if rank not in ranks]
        self._draining -= {self._running[rank].name for rank in ranks}
        self._running = [self._running[rank] for rank in kept]
        self._set_workers([self.get_workers()[rank] for rank in kept])

    def _check_min_workers(self, is_over: bool) -> None:
        """Ends the run if it has had too few workers for too long, after the remaining ones have saved their state.

        Args:
            is_over: whether no worker has anything left to do.

        Raises:
            ResourceError: there were too few for too long.
        """
        if self._too_few is None:
            num_placed = len(self._running) + sum(worker.is_placed for worker in self._joining)
            self._too_few = self._guard.check(len(self._running), num_placed, time.monotonic())
            if self._too_few is None:
                return
            if not self._guard.had_enough:
                raise self._too_few
        if is_over:
            raise self._too_few
        self._rendezvous.save_and_stop()  # again in each poll: a restarted rendezvous does not know

    # Ray Train's view

    def _set_workers(self, workers: list[Worker]) -> None:
        self._worker_group_state = WorkersState(
            start_time=time.monotonic(), placement_group_handle=NoPlacementGroup(), workers=workers, sync_actor=None
        )
        self._world_rank_to_ongoing_poll.clear()
        self._replica_groups = [ReplicaGroup([worker], self._resources) for worker in workers]
        self._worker_rank_to_replica_group_rank = {rank: rank for rank in range(len(workers))}

    def _emit(self, event: Event) -> None:
        self._config.writer.append.remote([event])
