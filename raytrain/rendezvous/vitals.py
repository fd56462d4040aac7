"""Which workers are alive and getting on? Decided from their heartbeats, without clocks, threads or Ray.

Each worker says what its training thread is doing and since when. A worker that says nothing for too long is dead or cut
off; one that stays in one call of the task's code is stuck. What may be slow gets a longer limit; what waits for others
has none of its own, since those others have theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raytrain.rendezvous.generation import Generation

STARTING, READING, RESTORING, SAVING = "starting", "reading data", "restoring a checkpoint", "saving"
SLOW = frozenset({STARTING, READING, RESTORING, SAVING})
WAITING, AT_DOOR = "waiting for its peers", "waiting for a generation"
PATIENT = frozenset({WAITING, AT_DOOR})


@dataclass(frozen=True)
class Beat:
    """A heartbeat.

    Args:
        worker: whose.
        step: finished steps of the state in its memory.
        place: what its training thread is doing: one of those above, or a name for a part of the task's code.
        since_s: seconds for which it has been doing that.
        is_first: whether no step of its process that did this has been finished yet, so that it may have to compile.
        generation: the latest one that it was in; a rendezvous that was started again learns from it who trains.
    """

    worker: str
    step: int
    place: str
    since_s: float
    is_first: bool
    generation: Generation | None = None

    def in_short(self) -> Beat:
        """The same without the members of its generation, of which there may be a thousand."""
        return replace(self, generation=self.generation and replace(self.generation, members=()))


@dataclass(frozen=True)
class Answer:
    """To a heartbeat.

    Args:
        is_broken: the worker's generation has lost a member, or is over.
        is_known: whether the rendezvous has the worker's handle and knows its generation; if not, it wants both.
    """

    is_broken: bool
    is_known: bool


@dataclass(frozen=True)
class Limits:
    """Seconds, see `RunConfig`."""

    heartbeat_s: float = 10.0
    hang_s: float = 25.0
    slow_s: float = 600.0


@dataclass
class Vitals:
    """The latest heartbeats of the living.

    Args:
        limits: when to give a worker up.
        look_every_s: how often `verdicts` is asked for. If it was not asked for much longer, whoever asks stood still, and
            silence in that time says nothing about the workers.
    """

    limits: Limits = Limits()
    look_every_s: float = 0.5
    _latest: dict[str, tuple[Beat, float]] = field(default_factory=dict)
    _looked: float | None = None

    def note(self, beat: Beat, now: float) -> None:
        self._latest[beat.worker] = (beat, now)

    def expect(self, worker: str, now: float, is_starting: bool) -> None:
        """From now on silence of `worker` counts, although it has not said anything yet.

        Args:
            worker: of whom nothing is known.
            now: seconds on the clock of `note`.
            is_starting: whether its process has just begun, so that its first heartbeat may be slow.
        """
        grace_s = self.limits.slow_s - self.limits.heartbeat_s if is_starting else 0.0
        self._latest.setdefault(worker, (Beat(worker, -1, STARTING, 0.0, is_first=True), now + grace_s))

    def forget(self, worker: str) -> None:
        self._latest.pop(worker, None)

    def verdicts(self, now: float, late: frozenset[str] = frozenset()) -> dict[str, str]:
        """Whom to give up, and why.

        Args:
            now: seconds on the clock of `note`.
            late: members that others have waited for at the door for `heartbeat_s`: a collective of theirs has failed, so
                one that is not busy with something slow should have come.
        """
        if self._looked is not None and now - self._looked > 4 * self.look_every_s:
            stood_still_s = now - self._looked
            self._latest = {worker: (beat, heard + stood_still_s) for worker, (beat, heard) in self._latest.items()}
        self._looked = now
        found = {worker: self._verdict(beat, now - heard, worker in late) for worker, (beat, heard) in self._latest.items()}
        return {worker: why for worker, why in found.items() if why}

    def _verdict(self, beat: Beat, silent_s: float, is_late: bool) -> str:
        where = f"{beat.place} at step {max(beat.step, 0)}"
        if silent_s > self.limits.heartbeat_s:
            return f"no heartbeat for {silent_s:.0f} s; it was last {where}"
        if beat.place in PATIENT:
            too_long = is_late
        elif beat.place in SLOW or beat.is_first:
            too_long = beat.since_s > self.limits.slow_s
        else:
            too_long = is_late or beat.since_s > self.limits.hang_s
        return f"stuck for {beat.since_s:.0f} s: {where}" if too_long else ""
