"""A Ray Train worker group whose workers come and go one by one, while the others never notice.

It starts empty; every worker, the first ones too, comes in as a joiner. A lost worker is dropped and asked for again,
inside the poll, so that Ray Train's controller stays in its running state and restarts nothing. What the workers do
about it among themselves is the rendezvous' business. It runs in the controller's thread.
"""

from __future__ import annotations

import time
from typing import Any

from raytrain.elastic.capacity import num_to_ask_for, surplus
from raytrain.elastic.enough import Enough
from raytrain.elastic.internals import (
    ReplicaGroup,
    Worker,
    WorkerGroup,
    WorkerGroupPollStatus,
    draining_nodes,
)
from raytrain.elastic.joiner import Joiner, JoinFailed
from raytrain.elastic.liaison import Liaison
from raytrain.elastic.lone_workers import GivenUp, LoneWorkers, NoPlacementGroup, context_of, is_lost
from raytrain.elastic.losses import Crashes, LossBudget
from raytrain.elastic.places import Places
from raytrain.elastic.quota import Quota
from raytrain.elastic.wiring import WIRING, Wiring
from raytrain.errors import DeadlyRowsError, WorkersLostError
from raytrain.events.kinds import Event, WorkerLeaving, WorkerLeft, WorkerLost, WorkerStarting

SILENT_S = 120.0
"""A worker whose process has not answered for so long is lost, if its heartbeats did not tell before; Ray Train's is 600."""
SOON_S = 10.0
"""After so long a worker that was asked for has begun, or waits for room."""


class ElasticWorkerGroup(WorkerGroup):
    """See the module; `Wiring` in the train loop's configuration tells it the range and its connections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        wiring: Wiring = self._train_run_context.train_loop_config[WIRING]
        self._wiring = wiring
        self._liaison = Liaison(wiring.rendezvous, wiring.num_logical)
        self._budget, self._crashes = LossBudget(wiring.max_failures), Crashes()
        self._resources: dict[str, float] = self._worker_group_context.resources_per_worker
        self._enough = Enough(wiring, self._resources, self._liaison, self._tell)
        self._places = Places(self._resources, wiring.share)
        self._quota = Quota(wiring.share, wiring.min_workers, wiring.max_workers, self._resources)
        self._joiners: list[Joiner] = []
        self._running: list[Joiner] = []
        """The joiner of each worker of the group, in the same order: it knows its placement group and name."""
        self._leaving: set[str] = set()
        """Workers whose nodes are about to go away, or whose places others need."""
        self._num_asked = 0
        self._asked_at = 0.0
        """When a worker was asked for last, in monotonic seconds."""
        self._worker_health_check_timeout_s = SILENT_S

    def _start_impl(self, worker_group_state_builder: Any) -> None:
        self._set_workers([])
        self._ask_for_workers(num_finished=0)
        self._advance()

    def poll_status(self, timeout: float | None = None) -> WorkerGroupPollStatus:
        """One look at all workers; lost ones are replaced here and are no errors.

        Raises:
            ResourceError: there was no room for the smallest group for too long.
            WorkersLostError: too many were lost in a row.
            DeadlyRowsError: processes died in the same step, with the same rows.
        """
        self._liaison.look()
        self._quota.look(len(self._running), self._liaison.step)
        self._advance()
        statuses = dict(enumerate(self._poll_workers_and_collect_errors(timeout))) if self._running else {}
        self._notice_drains()
        gone = self._lose_the_lost(statuses)
        gone |= self._see_off({rank: status for rank, status in statuses.items() if rank not in gone})
        self._drop(gone)
        statuses = {rank: status for rank, status in statuses.items() if rank not in gone}
        num_finished = sum(not s.running and s.error is None for s in statuses.values())
        self._give_up_surplus(num_finished)
        self._ask_for_workers(num_finished)
        num_placed = len(self._running) + sum(joiner.is_placed for joiner in self._joiners)
        is_over = num_finished == len(statuses)
        self._enough.look(len(self._running), num_placed, is_over, time.monotonic())
        self._latest_poll_status = self._status(statuses)
        return self._latest_poll_status

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
        self._quota.leave()

    # Coming

    def _ask_for_workers(self, num_finished: int) -> None:
        for _ in range(num_to_ask_for(len(self._staying()), len(self._joiners), num_finished, self._quota.num)):
            room = self._places.take()
            self._joiners.append(Joiner(self._num_asked, self._resources, room, self._wiring.slow_timeout_s))
            self._num_asked += 1
            self._asked_at = time.monotonic()

    @property
    def is_changing(self) -> bool:
        """Whether there is more to do than usual: a worker was just asked for, or leaves."""
        return bool(self._leaving) or time.monotonic() - self._asked_at < SOON_S

    def _staying(self) -> list[Joiner]:
        return [joiner for joiner in self._running if joiner.name not in self._leaving]

    def _advance(self) -> None:
        """Lets each joiner take the steps that it can take now."""
        for joiner in list(self._joiners):
            if joiner.place():
                self._liaison.tell_start(joiner.name)
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
        worker.distributed_context = context_of(joiner.serial, self._wiring.max_workers)
        self._running.append(joiner)
        self._set_workers([*self.get_workers(), worker])
        self._tell(WorkerStarting(worker=joiner.name, node=worker.metadata.node_ip, pid=worker.metadata.pid))

    def _train_context_for(self, joiner: Joiner) -> dict[str, Any]:
        return {
            "train_run_context": self._train_run_context,
            "distributed_context": context_of(joiner.serial, self._wiring.max_workers),
            "synchronization_actor": None,  # serves `ray.train.report`, which a task does not call
            "storage_context": self._storage_context,
            "worker_callbacks": self._worker_callbacks_to_propagate,
            "controller_actor": None,  # likewise
        }

    # Going

    def _lose_the_lost(self, statuses: dict[int, Any]) -> set[int]:
        """The ranks of workers whose process is gone, or that were given up; their loss is told and borne."""
        if any(is_lost(status.error) for status in statuses.values()):
            self._liaison.look_closely()  # perhaps it was killed for its silence; and in which step is the run?
        lost = set()
        for rank, (joiner, worker) in enumerate(zip(self._running, self.get_workers(), strict=True)):
            why, error = self._liaison.given_up.get(joiner.name), statuses[rank].error
            if why or is_lost(error):
                lost.add(rank)
                joiner.let_go()
                self._bear_loss(joiner, worker, GivenUp(why) if why else getattr(error, "health_check_failure", error))
        return lost

    def _notice_drains(self) -> None:
        deadlines = draining_nodes()
        for joiner, worker in zip(self._running, self.get_workers(), strict=True):
            node = worker.metadata.node_id
            if node in deadlines and joiner.name not in self._leaving:
                self._send_away(joiner, worker, deadline=deadlines[node])

    def _give_up_surplus(self, num_finished: int) -> None:
        """Gives back what others need: who is on the way at once, who trains after its step."""
        for joiner in surplus(self._staying(), self._joiners, num_finished, self._quota.low, self._quota.num):
            if joiner in self._joiners:
                self._joiners.remove(joiner)
                joiner.let_go()
                self._liaison.tell_withdrawal(joiner.name)
                continue
            self._send_away(joiner, self.get_workers()[self._running.index(joiner)], reason="others need its place")

    def _send_away(self, joiner: Joiner, worker: Worker, deadline: float = 0.0, reason: str = "") -> None:
        """Is to leave after its step."""
        self._leaving.add(joiner.name)
        self._tell(WorkerLeaving(worker=joiner.name, node=worker.metadata.node_ip, deadline=deadline, reason=reason))

    def _see_off(self, statuses: dict[int, Any]) -> set[int]:
        """Asks the workers that are to leave to do so; the ranks of those that have left."""
        left = set()
        for rank, status in statuses.items():
            joiner, metadata = self._running[rank], self.get_workers()[rank].metadata
            if joiner.name not in self._leaving:
                continue
            has_ended = not status.running and status.error is None
            if has_ended and joiner.name not in self._liaison.left:
                self._liaison.look_closely()
            if self._liaison.may_go(joiner.name) or (has_ended and joiner.name in self._liaison.left):
                left.add(rank)
                joiner.let_go()
                self._tell(WorkerLeft(worker=joiner.name, node=metadata.node_ip, pid=metadata.pid))
        return left

    def _bear_loss(self, joiner: Joiner, worker: Worker | None, cause: BaseException) -> None:
        """Tells everybody; raises if that was one too many. What was announced, or taken by the cloud, does not count."""
        self._liaison.tell_loss(joiner.name)
        why = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        node, pid = (worker.metadata.node_ip, worker.metadata.pid) if worker else ("", 0)
        self._tell(WorkerLost(worker=joiner.name, node=node, pid=pid, reason=why))
        if getattr(cause, "preempted", False) or joiner.name in self._leaving:
            return
        step, held = self._liaison.step, self._liaison.held(joiner.name)
        if held and not isinstance(cause, GivenUp) and (to_blame := self._crashes.note(step, held)):
            raise DeadlyRowsError(step, tuple(sorted(to_blame)), why)
        if not self._budget.lose(step):
            raise WorkersLostError(
                f"{self._budget.losses} workers were lost in a row at step {step}, without a finished step in between "
                f"(run.max_failures = {self._budget.max_failures}); the last one: {why}"
            )

    def _drop(self, ranks: set[int]) -> None:
        if not ranks:
            return
        kept = [rank for rank in range(len(self._running)) if rank not in ranks]
        self._leaving -= {self._running[rank].name for rank in ranks}
        self._running = [self._running[rank] for rank in kept]
        self._set_workers([self.get_workers()[rank] for rank in kept])

    # Looking

    def _status(self, statuses: dict[int, Any]) -> WorkerGroupPollStatus:
        return WorkerGroupPollStatus(
            worker_statuses=dict(enumerate(statuses.values())),
            worker_rank_to_replica_group_rank=self._worker_rank_to_replica_group_rank,
        )

    def _set_workers(self, workers: list[Worker]) -> None:
        self._worker_group_state = LoneWorkers(
            start_time=time.monotonic(), placement_group_handle=NoPlacementGroup(), workers=workers, sync_actor=None
        )
        self._world_rank_to_ongoing_poll.clear()
        self._replica_groups = [ReplicaGroup([worker], self._resources) for worker in workers]
        self._worker_rank_to_replica_group_rank = {rank: rank for rank in range(len(workers))}

    def _tell(self, event: Event) -> None:
        self._wiring.sink.append.remote([event])
