"""A Ray Train worker group whose workers come and go one by one, while the others never notice.

It starts empty; every worker, the first ones too, comes in as a joiner. A lost worker is dropped and asked for again,
inside the poll, so that Ray Train's controller stays in its running state and restarts nothing. What the workers do
about it among themselves is the rendezvous' business. It runs in the controller's thread.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from raytrain.elastic.capacity import LossBudget, num_to_ask_for, shortage
from raytrain.elastic.internals import (
    DistributedContext,
    PlacementGroupHandle,
    ReplicaGroup,
    Worker,
    WorkerGroup,
    WorkerGroupPollStatus,
    WorkerGroupState,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from raytrain.elastic.joiner import Joiner, JoinFailed
from raytrain.elastic.wiring import WIRING, Wiring, worker_name
from raytrain.errors import ResourceError, WorkersLostError
from raytrain.events.kinds import Event, WaitingForWorkers, WorkerLost, WorkerStarting

WAIT_BEFORE_TELLING_S = 5.0
SILENT_S = 120.0
"""A worker whose process has not answered for so long is lost; Ray Train would give it 600 s."""


class _NoPlacementGroup(PlacementGroupHandle):
    """Ray Train wants one placement group for all workers; here each worker has its own."""

    placement_group = property(lambda self: None)

    def ready(self) -> None:
        return None

    def wait(self, timeout_seconds: float = 30) -> bool:
        return True

    def shutdown(self) -> None:
        return None


class _State(WorkerGroupState):
    """Ends at once: the workers have nothing left to do when Ray Train shuts the group down."""

    def shutdown(self) -> None:
        for worker in self.workers:
            ray.kill(worker.actor)


class ElasticWorkerGroup(WorkerGroup):
    """See the module; `Wiring` in the train loop's configuration tells it the range and its connections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wiring: Wiring = self._train_run_context.train_loop_config[WIRING]
        self._budget = LossBudget(self._wiring.max_failures)
        self._joiners: list[Joiner] = []
        self._running: list[Joiner] = []
        """The joiner of each worker of the group, in the same order: it knows its placement group and serial."""
        self._num_asked = 0
        self._worker_health_check_timeout_s = SILENT_S
        self._had_enough = False
        self._too_few_since = time.monotonic()
        self._told_waiting = False

    def _start_impl(self, worker_group_state_builder: Any) -> None:
        self._set_workers([])
        self._ask_for_workers(num_finished=0)
        self._advance()

    def poll_status(self, timeout: float | None = None) -> WorkerGroupPollStatus:
        """One look at all workers; lost ones are replaced here and are no errors.

        Raises:
            ResourceError: there was no room for the smallest group in time.
            WorkersLostError: too many were lost in a row.
        """
        self._advance()
        status = self._look(timeout)
        lost = [rank for rank, worker in status.worker_statuses.items() if _is_lost(worker.error)]
        if lost:
            for rank in lost:
                self._lose(rank, status.worker_statuses[rank].error)
            self._drop(lost)
            status = self._status({r: s for r, s in status.worker_statuses.items() if r not in lost})
        num_finished = sum(not s.running and s.error is None for s in status.worker_statuses.values())
        self._ask_for_workers(num_finished)
        self._check_enough()
        self._latest_poll_status = status
        return status

    def shutdown(self) -> None:
        try:
            super().shutdown()
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Gives all workers and their resources back; may be called again."""
        for joiner in [*self._joiners, *self._running]:
            joiner.let_go()
        self._joiners, self._running = [], []

    # Coming

    def _ask_for_workers(self, num_finished: int) -> None:
        wanted = num_to_ask_for(len(self._running), len(self._joiners), num_finished, self._wiring.max_workers)
        for _ in range(wanted):
            self._joiners.append(Joiner(self._num_asked, self._worker_group_context.resources_per_worker))
            self._num_asked += 1

    def _advance(self) -> None:
        """Lets each joiner take the steps that it can take now."""
        for joiner in list(self._joiners):
            if joiner.place():
                self._wiring.rendezvous.start.remote(worker_name(joiner.serial))
                joiner.launch(self._train_context_for(joiner), self._worker_group_context.train_fn_ref)
            try:
                worker = joiner.poll()
            except JoinFailed as error:
                self._joiners.remove(joiner)
                joiner.let_go()
                self._bear_loss(joiner, None, error)
                continue
            if worker is not None:
                self._joiners.remove(joiner)
                self._admit(joiner, worker)

    def _admit(self, joiner: Joiner, worker: Worker) -> None:
        worker.distributed_context = self._distributed_context(joiner)
        self._running.append(joiner)
        self._had_enough |= len(self._running) >= self._wiring.min_workers
        self._set_workers([*self.get_workers(), worker])
        self._tell(WorkerStarting(worker=worker_name(joiner.serial), node=worker.metadata.node_ip, pid=worker.metadata.pid))

    def _train_context_for(self, joiner: Joiner) -> dict[str, Any]:
        return {
            "train_run_context": self._train_run_context,
            "distributed_context": self._distributed_context(joiner),
            "synchronization_actor": None,  # serves `ray.train.report`, which a task does not call
            "storage_context": self._storage_context,
            "worker_callbacks": self._worker_callbacks_to_propagate,
            "controller_actor": None,  # likewise
        }

    def _distributed_context(self, joiner: Joiner) -> DistributedContext:
        """Ranks change with each generation, so Ray Train is given the worker's serial number instead."""
        return DistributedContext(
            local_rank=0,
            local_world_size=1,
            world_rank=joiner.serial,
            world_size=self._wiring.max_workers,
            node_rank=0,
        )

    # Going

    def _lose(self, rank: int, error: BaseException | None) -> None:
        joiner, worker = self._running[rank], self.get_workers()[rank]
        cause = error.health_check_failure if isinstance(error, WorkerHealthCheckFailedError) else error
        ray.kill(worker.actor)
        remove_placement_group(joiner.placement_group)
        self._bear_loss(joiner, worker, cause)

    def _bear_loss(self, joiner: Joiner, worker: Worker | None, cause: BaseException | None) -> None:
        """Tells everybody; raises WorkersLostError if that was one too many. Preemptions do not count."""
        self._wiring.rendezvous.lose.remote(worker_name(joiner.serial))
        self._tell_lost(joiner, worker, (str(cause).strip() or type(cause).__name__).splitlines()[0])
        if getattr(cause, "preempted", False):
            return
        finished = ray.get(self._wiring.sink.finished_steps.remote())
        if not self._budget.lose(finished):
            raise WorkersLostError(
                f"{self._budget.losses} workers were lost in a row at step {finished}, without a finished step in between "
                f"(run.max_failures = {self._budget.max_failures}); the last one: {cause}"
            )

    def _drop(self, ranks: list[int]) -> None:
        kept = [rank for rank in range(len(self._running)) if rank not in ranks]
        self._running = [self._running[rank] for rank in kept]
        self._set_workers([self.get_workers()[rank] for rank in kept])

    # Looking

    def _look(self, timeout: float | None) -> WorkerGroupPollStatus:
        return self._status(dict(enumerate(self._poll_workers_and_collect_errors(timeout))) if self._running else {})

    def _status(self, statuses: dict[int, Any]) -> WorkerGroupPollStatus:
        return WorkerGroupPollStatus(
            worker_statuses=dict(enumerate(statuses.values())),
            worker_rank_to_replica_group_rank=self._worker_rank_to_replica_group_rank,
        )

    def _set_workers(self, workers: list[Worker]) -> None:
        resources = self._worker_group_context.resources_per_worker
        self._worker_group_state = _State(
            start_time=time.monotonic(), placement_group_handle=_NoPlacementGroup(), workers=workers, sync_actor=None
        )
        self._world_rank_to_ongoing_poll.clear()
        self._replica_groups = [ReplicaGroup([worker], resources) for worker in workers]
        self._worker_rank_to_replica_group_rank = {rank: rank for rank in range(len(workers))}

    def _check_enough(self) -> None:
        """Too few workers: says so after a while, and gives up if there never were enough, or none is left."""
        placed = len(self._running) + sum(joiner.is_placed for joiner in self._joiners)
        if placed >= self._wiring.min_workers:
            self._too_few_since, self._told_waiting = time.monotonic(), False
            return
        waited_s = time.monotonic() - self._too_few_since
        asked, total = self._worker_group_context.resources_per_worker, ray.cluster_resources()
        reason = shortage(asked, self._wiring.min_workers, total)
        if waited_s > WAIT_BEFORE_TELLING_S and not self._told_waiting:
            self._told_waiting = True
            self._tell(WaitingForWorkers(have=placed, need=self._wiring.min_workers, reason=reason))
        if waited_s > self._wiring.start_timeout_s and not (self._running and self._had_enough):
            raise ResourceError(
                "run.workers",
                f"at least {self._wiring.min_workers} workers; {placed} could be placed in {waited_s:.0f} s",
                reason,
                "lower run.workers or run.cpus_per_worker, add nodes, or raise run.start_timeout_s",
            )

    def _tell_lost(self, joiner: Joiner, worker: Worker | None, reason: str) -> None:
        node, pid = (worker.metadata.node_ip, worker.metadata.pid) if worker else ("", 0)
        self._tell(WorkerLost(worker=worker_name(joiner.serial), node=node, pid=pid, reason=reason))

    def _tell(self, event: Event) -> None:
        self._wiring.sink.append.remote([event])


def _is_lost(error: BaseException | None) -> bool:
    """Whether a worker's process is gone or silent, rather than its code having raised."""
    return isinstance(error, WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError)
