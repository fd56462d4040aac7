"""Which workers are alive and making progress? Decided from their heartbeats, without clocks, threads or Ray.

Each heartbeat says what the training thread is doing and since when. A worker that sends none, and whose process does not
answer either, is dead or cut off; one that stays in one call of the task's code is stuck. Slow activities get a longer
timeout. A worker that waits for its peers has no timeout of its own, since its peers have theirs; only if all members of a
generation wait for each other, nothing explains it, and they should form a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raytrain.rendezvous.state import EMPTY_GENERATION, Generation

STARTING, READING, RESTORING, SAVING = "starting", "reading data", "restoring a checkpoint", "saving"
SLOW = frozenset({STARTING, READING, RESTORING, SAVING})
WAITING, AT_RENDEZVOUS = "waiting for its peers", "waiting for a generation"
HANDING_OVER = "handing over the state"
REDUCING = "in the last backward pass, or waiting for its peers"
IN_COLLECTIVE = frozenset({WAITING, HANDING_OVER, REDUCING})
"""A worker may be busy in the last two, but it may as well wait for a peer."""
WAITS_FOR_OTHERS = IN_COLLECTIVE | {AT_RENDEZVOUS}

SLOW_LIMIT, HANG_LIMIT = "run.slow_timeout_s", "run.hang_timeout_s"
Address = tuple[str, int]


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat of one worker.

    Args:
        worker: its identity.
        step: finished steps of the state in its memory.
        activity: what its training thread is doing: one of those above, or the name of a part of the task's code.
        since_s: seconds for which it has been doing that.
        is_first: whether its process has not finished a step with this activity, on tensors of these shapes, yet, so that it
            may have to compile.
        generation: the latest one that it was in; a restarted rendezvous learns from it who trains.
        usual_s: the seconds that this activity took in the latest finished step that had it.
        store: host and port of the TCPStore that its process serves, and that answers while the GIL is held.
    """

    worker: str
    step: int
    activity: str
    since_s: float
    is_first: bool
    generation: Generation | None = None
    usual_s: float = 0.0
    store: Address | None = None

    def is_in(self, generation: int) -> bool:
        """Whether it was sent in the generation with this number."""
        return self.generation is not None and self.generation.number == generation

    def without_members(self) -> Heartbeat:
        """The same, without the members of its generation, of which there may be a thousand."""
        return replace(self, generation=self.generation and replace(self.generation, members=()))


@dataclass(frozen=True)
class HeartbeatReply:
    """What the rendezvous replies to a heartbeat.

    Args:
        is_broken: the worker's generation has lost a member, or is over.
        is_known: the rendezvous has the worker's handle and its generation; otherwise the worker sends both again.
    """

    is_broken: bool
    is_known: bool


@dataclass(frozen=True)
class HealthTimeouts:
    """Seconds, see `RunConfig`."""

    heartbeat_s: float = 10.0
    hang_s: float = 25.0
    slow_s: float = 600.0
    collective_s: float = 20.0


@dataclass
class HealthMonitor:
    """Keeps the latest heartbeat of each worker and names those to evict.

    Args:
        timeouts: after which a worker is evicted.
        check_every_s: how often `unhealthy` is called. If it was not called for much longer, its process stood still, and
            silence in that time says nothing about the workers.
    """

    timeouts: HealthTimeouts = HealthTimeouts()
    check_every_s: float = 0.5
    _latest: dict[str, tuple[Heartbeat, float]] = field(default_factory=dict)
    _answered: dict[str, float] = field(default_factory=dict)
    """When the process of a silent worker has answered."""
    _checked: float | None = None

    def record(self, heartbeat: Heartbeat, now: float) -> None:
        self._latest[heartbeat.worker] = (heartbeat, now)

    def record_answer(self, worker: str, now: float) -> None:
        """The process of a silent worker lives: something, perhaps the task's code, holds its GIL."""
        self._answered[worker] = now

    def expect(self, worker: str, now: float, is_starting: bool, store: Address | None = None) -> None:
        """Starts the timeout of a worker that has not sent a heartbeat yet.

        Args:
            worker: its identity.
            now: seconds on the clock of `record`.
            is_starting: whether its process has just started, so that its first heartbeat may take long.
            store: see `Heartbeat`.
        """
        grace_s = self.timeouts.slow_s - self.timeouts.heartbeat_s if is_starting else 0.0
        heartbeat = Heartbeat(worker, -1, STARTING, 0.0, is_first=True, store=store)
        self._latest.setdefault(worker, (heartbeat, now + grace_s))

    def forget(self, worker: str) -> None:
        self._latest.pop(worker, None)
        self._answered.pop(worker, None)

    def silent(self, now: float) -> dict[str, Address]:
        """Workers that should have sent a heartbeat by now, with the stores of which to ask whether their processes live."""
        return {
            worker: beat.store
            for worker, (beat, received) in self._latest.items()
            if beat.store is not None and now - received > self.timeouts.heartbeat_s / 2
        }

    def unhealthy(
        self, now: float, overdue: frozenset[str] = frozenset(), generation: Generation = EMPTY_GENERATION
    ) -> dict[str, str]:
        """The workers to evict, each with the reason.

        Args:
            now: seconds on the clock of `record`.
            overdue: members that were told long ago that their generation is over, and have not joined again.
            generation: the latest one; a member that is alone in it waits for nobody.
        """
        if self._checked is not None and now - self._checked > 4 * self.check_every_s:
            stood_still_s = now - self._checked
            self._latest = {worker: (beat, received + stood_still_s) for worker, (beat, received) in self._latest.items()}
        self._checked = now
        alone = generation.number if len(generation.members) == 1 else None
        reasons = {worker: self._reason(worker, now, worker in overdue, alone) for worker in self._latest}
        return {worker: reason for worker, reason in reasons.items() if reason}

    def is_stalled(self, generation: Generation, now: float) -> bool:
        """Whether all members wait for each other, for longer than anything explains.

        A member that is silent, busy, or on its way is an explanation, until it is evicted.
        """
        members = [member.worker for member in generation.members]
        return len(members) > 1 and all(self._waits_too_long(worker, generation, now) for worker in members)

    def _waits_too_long(self, worker: str, generation: Generation, now: float) -> bool:
        heartbeat, received = self._latest.get(worker, (None, 0.0))
        if heartbeat is None or now - received > self.timeouts.heartbeat_s / 2:
            return False
        limit_s, _ = self._wait_limit(heartbeat)
        is_in_collective = heartbeat.activity in IN_COLLECTIVE and heartbeat.is_in(generation.number)
        return is_in_collective and heartbeat.since_s > generation.timeout_factor * limit_s

    def _reason(self, worker: str, now: float, is_overdue: bool, alone: int | None) -> str:
        """Why to evict a worker, or ""; `alone`: number of the generation if it has one member."""
        heartbeat, received = self._latest[worker]
        silent_s, heartbeat_s, activity = now - received, self.timeouts.heartbeat_s, heartbeat.activity
        where = f"{activity} at step {max(heartbeat.step, 0)}"
        if now - max(received, self._answered.get(worker, received)) > heartbeat_s:
            return f"no heartbeat for {silent_s:.0f} s; it was last {where}"
        is_alone = activity in IN_COLLECTIVE and alone is not None and heartbeat.is_in(alone)
        waits = activity in WAITS_FOR_OTHERS and not is_alone
        stuck_s = max(0.0 if waits else heartbeat.since_s, silent_s if silent_s > heartbeat_s else 0.0)
        limit_s, name = self._wait_limit(heartbeat) if is_alone else self._own_limit(heartbeat)
        if stuck_s > limit_s:
            return f"stuck for {stuck_s:.0f} s: {where} ({name}: {limit_s:g} s)"
        may_be_busy = activity == REDUCING and heartbeat.since_s <= self._wait_limit(heartbeat)[0]
        if is_overdue and waits and not may_be_busy:
            return f"stuck for {heartbeat.since_s:.0f} s: {where}, in a group that is over"
        return ""

    def _own_limit(self, heartbeat: Heartbeat) -> tuple[float, str]:
        """For how many seconds a worker may be busy with something of its own, and what says so."""
        is_slow = heartbeat.activity in SLOW or heartbeat.activity == HANDING_OVER or heartbeat.is_first
        return (self.timeouts.slow_s, SLOW_LIMIT) if is_slow else (self.timeouts.hang_s, HANG_LIMIT)

    def _wait_limit(self, heartbeat: Heartbeat) -> tuple[float, str]:
        """For how many seconds it is no wonder that all members are in such an activity, and what says so."""
        timeouts, usual_s = self.timeouts, heartbeat.usual_s
        limits = [(timeouts.collective_s, "run.collective_timeout_s"), (2 * usual_s, "twice the time of earlier steps")]
        if heartbeat.activity == HANDING_OVER or heartbeat.is_first:
            limits.append((timeouts.slow_s, SLOW_LIMIT))
        elif heartbeat.activity == REDUCING:
            limits.append((timeouts.hang_s, HANG_LIMIT))
        return max(limits)
