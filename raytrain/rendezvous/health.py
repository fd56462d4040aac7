"""Which workers are alive and making progress? Decided from their heartbeats, without clocks, threads or Ray.

Each heartbeat says what the training thread is doing and since when. A worker that sends none for too long is dead or cut
off; one that stays in one call of the task's code is stuck. Slow activities get a longer timeout; a worker that waits for
its peers has no timeout of its own, since its peers have theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raytrain.rendezvous.state import Generation

STARTING, READING, RESTORING, SAVING = "starting", "reading data", "restoring a checkpoint", "saving"
SLOW = frozenset({STARTING, READING, RESTORING, SAVING})
WAITING, AT_RENDEZVOUS = "waiting for its peers", "waiting for a generation"
WAITS_FOR_OTHERS = frozenset({WAITING, AT_RENDEZVOUS})


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat of one worker.

    Args:
        worker: its identity.
        step: finished steps of the state in its memory.
        activity: what its training thread is doing: one of those above, or the name of a part of the task's code.
        since_s: seconds for which it has been doing that.
        is_first: whether its process has not finished a step with this activity yet, so that it may have to compile.
        generation: the latest one that it was in; a restarted rendezvous learns from it who trains.
    """

    worker: str
    step: int
    activity: str
    since_s: float
    is_first: bool
    generation: Generation | None = None

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
    _checked: float | None = None

    def record(self, heartbeat: Heartbeat, now: float) -> None:
        self._latest[heartbeat.worker] = (heartbeat, now)

    def expect(self, worker: str, now: float, is_starting: bool) -> None:
        """Starts the timeout of a worker that has not sent a heartbeat yet.

        Args:
            worker: its identity.
            now: seconds on the clock of `record`.
            is_starting: whether its process has just started, so that its first heartbeat may take long.
        """
        grace_s = self.timeouts.slow_s - self.timeouts.heartbeat_s if is_starting else 0.0
        self._latest.setdefault(worker, (Heartbeat(worker, -1, STARTING, 0.0, is_first=True), now + grace_s))

    def forget(self, worker: str) -> None:
        self._latest.pop(worker, None)

    def unhealthy(self, now: float, overdue: frozenset[str] = frozenset()) -> dict[str, str]:
        """The workers to evict, each with the reason.

        Args:
            now: seconds on the clock of `record`.
            overdue: members for which others have waited at the rendezvous for `heartbeat_s`: one of their collectives has
                failed, so a member that is not busy with something slow should have joined.
        """
        if self._checked is not None and now - self._checked > 4 * self.check_every_s:
            stood_still_s = now - self._checked
            self._latest = {worker: (beat, received + stood_still_s) for worker, (beat, received) in self._latest.items()}
        self._checked = now
        reasons = {w: self._reason(beat, now - received, w in overdue) for w, (beat, received) in self._latest.items()}
        return {worker: reason for worker, reason in reasons.items() if reason}

    def _reason(self, heartbeat: Heartbeat, silent_s: float, is_overdue: bool) -> str:
        where = f"{heartbeat.activity} at step {max(heartbeat.step, 0)}"
        if silent_s > self.timeouts.heartbeat_s:
            return f"no heartbeat for {silent_s:.0f} s; it was last {where}"
        if heartbeat.activity in WAITS_FOR_OTHERS:
            is_stuck = is_overdue
        elif heartbeat.activity in SLOW or heartbeat.is_first:
            is_stuck = heartbeat.since_s > self.timeouts.slow_s
        else:
            is_stuck = is_overdue or heartbeat.since_s > self.timeouts.hang_s
        return f"stuck for {heartbeat.since_s:.0f} s: {where}" if is_stuck else ""
