"""How many workers should a run have now, are there enough, and has it lost too many?

Pure decisions of the controller, and its clients of the two actors that have a say: the rendezvous, which knows who trains,
and the broker of a sweep, which allocates workers to trials. A missing worker is requested by a placement group of its own
(`placement`), so nothing here counts nodes. Calls to the actors never block the control loop for long; both may be down for
a while, since Ray restarts them: then the latest answer holds, and what they must know is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from raytrain.elastic.controller_config import ControllerConfig
from raytrain.elastic.placement import ResourceLease
from raytrain.errors import ResourceError
from raytrain.events.kinds import Event, WaitingForWorkers
from raytrain.plan import logical_workers_of
from raytrain.rendezvous.actor import RendezvousStatus

REPORT_AFTER_S = 5.0
"""A run reports that it waits for workers after this time."""
REFRESH_TIMEOUT_S = 2.0
POISON_DEATHS = 3
"""Deaths of processes in the same step, with the same rows, that end the run."""


def num_to_request(num_staying: int, num_joining: int, num_finished: int, max_workers: int) -> int:
    """Workers to request now; none once one of them has finished the run.

    Args:
        num_staying: workers that run, without those that drain.
        num_joining: workers that were requested and do not run yet.
        num_finished: workers that have finished the run.
        max_workers: the most that are wanted.
    """
    return 0 if num_finished else max(0, max_workers - num_staying - num_joining)


class Releasable(Protocol):
    @property
    def is_extra(self) -> bool:
        """Whether other runs can use the slot once it is released."""


R = TypeVar("R", bound=Releasable)


def surplus(staying: Sequence[R], joining: Sequence[R], num_finished: int, min_workers: int, max_workers: int) -> list[R]:
    """The workers to release because the run has more than it may have: joining ones first, the newest first.

    Running workers are released only while `min_workers` of them stay: a reserved slot that was lost with its node is
    requested again, and may take long to be placed.

    Args:
        staying: workers that run and do not drain, oldest first.
        joining: workers that were requested and do not run yet, oldest first.
        num_finished: workers that have finished the run; once there are some, none is released.
        min_workers, max_workers: the fewest with which the run trains, and the most that it may have.
    """
    num_over = 0 if num_finished else max(0, len(staying) + len(joining) - max_workers)
    newcomers = [one for one in reversed(joining) if one.is_extra]
    running = [one for one in reversed(staying) if one.is_extra][: max(0, len(staying) - min_workers)]
    return [*newcomers, *running][:num_over]


def shortage(requested: dict[str, float], num_workers: int, total: dict[str, float]) -> str:
    """What a cluster lacks for `num_workers` workers, for example "asked for 4 CPU, the cluster has 2"."""
    parts = []
    for name, amount in requested.items():
        if amount:
            parts.append(f"asked for {amount * num_workers:g} {name}, the cluster has {total.get(name, 0.0):g}")
    return "; ".join(parts)


@dataclass
class FailureBudget:
    """Counts failures in a row without a finished step in between, so preemptions of a long run do not add up.

    Losses with one cause, such as those of a rack, are one failure.
    """

    max_failures: int
    step: int = -1
    _events: set[Hashable] = field(default_factory=set)

    @property
    def failures(self) -> int:
        return len(self._events)

    def spend(self, finished_steps: int, event: Hashable) -> bool:
        """Records a loss; returns whether the run may go on.

        Args:
            finished_steps: of the run.
            event: equal for losses that happened together.
        """
        if finished_steps > self.step:
            self.step, self._events = finished_steps, set()
        self._events.add(event)
        return self.failures <= self.max_failures


@dataclass
class PoisonRows:
    """Finds rows that kill their process: the same logical worker was assigned to each process that died in a step."""

    step: int = -1
    _assigned: list[frozenset[int]] = field(default_factory=list)

    def record_death(self, step: int, assigned: frozenset[int]) -> frozenset[int]:
        """Records that a process died in `step` with these logical workers.

        Returns:
            the logical workers whose rows killed it, once there have been enough such deaths; else none.
        """
        if step != self.step:
            self.step, self._assigned = step, []
        self._assigned.append(assigned)
        recent = self._assigned[-POISON_DEATHS:]
        return frozenset.intersection(*recent) if len(recent) == POISON_DEATHS else frozenset()


class MinWorkersGuard:
    """Reports that a run has too few workers after a while, and ends it after the timeout.

    Args:
        config: of the run.
        resources: of one worker.
        emit: takes an event.
    """

    def __init__(self, config: ControllerConfig, resources: dict[str, float], emit: Callable[[Event], None]) -> None:
        self._config, self._resources, self._emit = config, resources, emit
        self._short_since: float | None = None
        self._is_reported = False
        self.had_enough = False
        """Whether there ever were enough workers."""

    def check(self, num_running: int, num_placed: int, now: float) -> ResourceError | None:
        """Returns the error with which the run should end, None while it may go on.

        Args:
            num_running: workers that run.
            num_placed: these, and those whose slot is placed and that are starting.
            now: monotonic time in seconds.
        """
        config = self._config
        self.had_enough |= num_running >= config.min_workers
        if num_placed >= config.min_workers:
            self._short_since, self._is_reported = None, False
            return None
        self._short_since = now if self._short_since is None else self._short_since
        waited_s = now - self._short_since
        if waited_s > (config.wait_timeout_s if self.had_enough else config.start_timeout_s):
            return ResourceError(
                "run.workers",
                f"at least {config.min_workers} workers; there were {num_placed} for {waited_s:.0f} s",
                self._shortage(),
                "lower run.workers or run.cpus_per_worker, add nodes, or raise run.start_timeout_s or run.wait_timeout_s",
            )
        if waited_s > REPORT_AFTER_S and not self._is_reported:
            self._is_reported = True
            self._emit(WaitingForWorkers(have=num_placed, need=config.min_workers, reason=self._shortage()))
        return None

    def _shortage(self) -> str:
        return shortage(self._resources, self._config.min_workers, ray.cluster_resources())


class RendezvousClient:
    """The controller's client of the rendezvous.

    Args:
        rendezvous: handle of the `RendezvousActor`.
        num_logical: logical workers of the run.
    """

    def __init__(self, rendezvous: Any, num_logical: int) -> None:
        self._rendezvous, self._num_logical = rendezvous, num_logical
        self._status_call: Any = None
        self._drain_calls: dict[str, Any] = {}
        self._loss_calls: dict[str, Any] = {}
        self._gone: list[str] = []
        """Workers that were given up."""
        self._status = RendezvousStatus({}, frozenset(), (), 0)
        self._assigned: dict[str, frozenset[int]] = {}

    @property
    def step(self) -> int:
        """The most finished steps that any worker has reported."""
        return max(0, self._status.step)

    @property
    def evicted(self) -> dict[str, str]:
        """Evicted workers with the reasons."""
        return self._status.evicted

    @property
    def drained(self) -> frozenset[str]:
        """Workers that have left as they were asked to."""
        return self._status.drained

    def assigned(self, worker: str) -> frozenset[int]:
        """The logical workers of `worker` in the latest generation that is known; none if it never trained."""
        return self._assigned.get(worker, frozenset())

    def lost_in(self, worker: str) -> int | None:
        """The generation that has lost `worker`; None if it was in none."""
        number = self._status.generation if worker in self._status.members else None
        return self._status.lost_in.get(worker, number)

    def expect(self, worker: str) -> None:
        self._rendezvous.expect.remote(worker)

    def report_lost(self, worker: str) -> None:
        """`worker` is gone for good: if it was cut off and comes back, it is not admitted."""
        self._gone.append(worker)
        self._loss_calls[worker] = self._rendezvous.report_lost.remote(worker)
        self._drain_calls.pop(worker, None)

    def withdraw(self, worker: str) -> None:
        """A worker that was expected does not come."""
        self._rendezvous.drain.remote(worker)

    def save_and_stop(self) -> None:
        self._rendezvous.save_and_stop.remote()

    def poll(self) -> None:
        """Takes the status that was requested last time, if it is there, and requests the next one."""
        self._repeat_lost_reports()
        if self._status_call is None or ray.wait([self._status_call], timeout=0)[0]:
            self._take_status(0.0)
            self._status_call = self._rendezvous.status.remote()

    def refresh(self) -> None:
        """Waits for the status of this moment, for a short time."""
        self._status_call = self._rendezvous.status.remote()
        self._take_status(REFRESH_TIMEOUT_S)

    def drain(self, worker: str) -> bool:
        """Asks `worker` to leave after its step; returns whether it takes no part in the run, so that it can go at once."""
        call = self._drain_calls.get(worker)
        if call is None:
            self._drain_calls[worker] = self._rendezvous.drain.remote(worker)
            return False
        if not ray.wait([call], timeout=0)[0]:
            return False
        del self._drain_calls[worker]  # it is sent again: a restarted rendezvous does not know
        try:
            return not ray.get(call)
        except RayActorError:
            return False

    def _repeat_lost_reports(self) -> None:
        for worker, call in list(self._loss_calls.items()):
            if not ray.wait([call], timeout=0)[0]:
                continue
            try:
                ray.get(call)
                del self._loss_calls[worker]
            except RayActorError:
                self._loss_calls[worker] = self._rendezvous.report_lost.remote(worker)

    def _take_status(self, timeout_s: float) -> None:
        if self._status_call is None:
            return
        previous = self._status.started_at
        try:
            self._status = ray.get(self._status_call, timeout=timeout_s)
        except (RayActorError, GetTimeoutError):
            return
        finally:
            self._status_call = None
        if previous and self._status.started_at != previous:  # it was restarted, and does not know who is gone
            for worker in self._gone:
                self._loss_calls[worker] = self._rendezvous.report_lost.remote(worker)
        members = self._status.members
        for rank, worker in enumerate(members):
            self._assigned[worker] = frozenset(logical_workers_of(rank, len(members), self._num_logical))


@dataclass(frozen=True)
class Demand:
    """What a run reports to the broker at each poll.

    Args:
        name: of the run, among all that share the cluster.
        min_workers, max_workers: the workers that it needs, and the most that it can use.
        resources: of one worker.
        num_workers: that train now.
        step: finished steps.
    """

    name: str
    min_workers: int
    max_workers: int
    resources: dict[str, float]
    num_workers: int = 0
    step: int = 0


class Allocation:
    """The number of workers that a run may have, as the broker allocates it.

    Args:
        lease: None for a run of its own, which may have as many as it can use.
        min_workers, max_workers: the workers that it needs, and the most that it can use.
        resources: of one worker.
    """

    def __init__(self, lease: ResourceLease | None, min_workers: int, max_workers: int, resources: dict[str, float]) -> None:
        self._lease, self._resources = lease, resources
        self.min_workers, self._max_workers = min_workers, max_workers
        self.num_workers = min_workers if lease else max_workers
        """The most workers now."""
        self._call: Any = None

    def poll(self, num_workers: int, step: int) -> None:
        """Reports the run's demand, and takes a reply of the broker if there is one."""
        if self._lease is None:
            return
        broker, name = self._lease.broker, self._lease.name
        broker.request.remote(Demand(name, self.min_workers, self._max_workers, self._resources, num_workers, step))
        if self._call is None or ray.wait([self._call], timeout=0)[0]:
            self._take_reply()
            self._call = broker.changed.remote(name, self.num_workers)

    def leave(self) -> None:
        """The run needs no workers any more."""
        if self._lease is not None:
            self._lease.broker.leave.remote(self._lease.name)

    def _take_reply(self) -> None:
        if self._call is None:
            return
        try:
            self.num_workers = max(self.min_workers, min(self._max_workers, ray.get(self._call)))
        except RayError:
            return  # it is being restarted, and learns from what the runs report
