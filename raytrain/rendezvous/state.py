"""Which workers train together? The rendezvous as a pure state machine, without clocks, threads or Ray.

Workers join at a step boundary; a generation forms once every living member of the previous one has joined again and
there are at least `min_workers`. The worker with the most finished steps becomes rank 0, and its state is broadcast. The
actor that drives this machine is in `actor`; whether a worker is alive is decided in `health`.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

NO_STATE = -1
"""The step of a worker that has no training state in memory yet."""
MAX_TIMEOUT_FACTOR = 64
SHORT_LIFE_S = 5.0
"""A worker that dies sooner than this after it was admitted counts against its node."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 5.0, 300.0


@dataclass(frozen=True)
class JoinRequest:
    """A worker that wants to be a member of the next generation.

    Args:
        worker: its identity, for as long as its process lives.
        step: finished steps of the state in its memory, or NO_STATE.
        store: host and port of the TCPStore that it serves.
        node: the address of its node, for people.
        pid: its process.
        node_id: Ray's id of its node.
        is_saved: whether a verified checkpoint of this step is on storage.
        last_generation: number of the generation that it was in last.
    """

    worker: str
    step: int
    store: tuple[str, int]
    node: str = ""
    pid: int = 0
    node_id: str = ""
    is_saved: bool = False
    last_generation: int = 0


@dataclass(frozen=True)
class Generation:
    """Workers that train together in one process group, in the order of their ranks; rank 0 is the leader."""

    number: int
    members: tuple[JoinRequest, ...]
    cause: str
    """"start", "loss", "join", "drain", or "retry": the same members again, since a collective failed or never ended."""
    waited_s: float = 0.0
    """Seconds for which fewer than `min_workers` were waiting."""
    timeout_factor: int = 1
    """Multiplies the time for which all members may wait for each other; doubles with each "retry" in a row."""
    max_step: int = NO_STATE
    """The most finished steps that any worker has reported; more than the members have if all who had them are lost."""

    def has(self, worker: str) -> bool:
        return any(member.worker == worker for member in self.members)

    def rank_of(self, worker: str) -> int:
        return [member.worker for member in self.members].index(worker)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._pickled,)

    @cached_property
    def _pickled(self) -> bytes:
        """Pickled once although each member receives it: with a thousand members this takes milliseconds."""
        return pickle.dumps([getattr(self, field.name) for field in fields(self)])


def _unpickled(data: bytes) -> Generation:
    return Generation(*pickle.loads(data))


EMPTY_GENERATION = Generation(0, (), "")
"""The reply to a worker that was declared dead while it waited: it may join again."""


@dataclass(frozen=True)
class Signals:
    """What some ranks know and all ranks must act on at the same step boundary."""

    regroup: bool = False
    """Return to the rendezvous: newcomers wait there, or some members drain."""
    save: bool = False
    """All members drain: save the state first."""
    stop: bool = False
    """Save, and end the run."""
    drain: bool = False
    """Some members drain and time is short: interrupt whatever takes longer than a step."""


@dataclass
class NodeBackoff:
    """Delays newcomers from nodes whose workers die soon after they join, since each join pauses all others.

    Times are arguments, in seconds. The first short life costs a node nothing.
    """

    _admitted: dict[str, tuple[str, float]] = field(default_factory=dict)
    _short_lives: dict[str, int] = field(default_factory=dict)

    def record_admission(self, worker: str, node: str, now: float) -> None:
        self._admitted.setdefault(worker, (node, now))

    def record_loss(self, worker: str, now: float) -> None:
        """Ignores workers that were never admitted."""
        node, since = self._admitted.pop(worker, ("", 0.0))
        if node:
            self._short_lives[node] = self._short_lives.get(node, 0) + 1 if now - since < SHORT_LIFE_S else 0

    def delay_s(self, node: str) -> float:
        """How long a newcomer from this node waits before it is admitted."""
        repeated = self._short_lives.get(node, 0) - 1
        doublings = min(repeated - 1, 16)  # of a node that has been failing for days
        return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**doublings) if repeated > 0 else 0.0


@dataclass
class Rendezvous:
    """The state machine.

    Args:
        min_workers: the smallest generation.
        settle_s: seconds for which newcomers wait for other workers that are starting, to be admitted together.
        max_workers: the largest generation; newcomers beyond it are spares, which wait until a member is lost or leaves.
    """

    min_workers: int
    settle_s: float = 1.0
    max_workers: int = sys.maxsize
    generation: Generation = field(default_factory=lambda: Generation(0, (), "start"))
    waiting: dict[str, tuple[JoinRequest, float]] = field(default_factory=dict)
    """Join requests with their times of arrival in seconds."""
    starting: set[str] = field(default_factory=set)
    """Workers whose processes run but that have not joined yet."""
    admitted: dict[str, JoinRequest] = field(default_factory=dict)
    """Members of the latest generation that was formed here."""
    alive: set[str] = field(default_factory=set)
    """Members of the generation that are not known to be dead."""
    draining: set[str] = field(default_factory=set)
    """Workers that were asked to leave and have not left yet."""
    lost: set[str] = field(default_factory=set)
    """Workers that were lost and have not joined again."""
    has_lost: bool = False
    """Whether the generation has lost a member."""
    has_drained: bool = False
    """Whether a member of the generation has drained."""
    stalled_at: float | None = None
    """When it was found that all members of the generation wait for each other, for too long."""
    stop_requested: bool = False
    closed: bool = False
    short_since: float | None = None
    """Since when too few workers wait although all members have joined."""
    max_step: int = NO_STATE
    """The most finished steps that any worker has reported."""
    backoff: NodeBackoff = field(default_factory=NodeBackoff)

    def expect(self, worker: str) -> None:
        """The process of `worker` runs and will join soon."""
        self.starting.add(worker)

    def join(self, request: JoinRequest, now: float) -> None:
        self.starting.discard(request.worker)
        self.lost.discard(request.worker)
        self.max_step = max(self.max_step, request.step)
        self.waiting[request.worker] = (request, now)

    def is_waiting(self, request: JoinRequest) -> bool:
        """Whether this very request still waits; a worker that joins twice may send equal ones."""
        waiting, _ = self.waiting.get(request.worker, (None, 0.0))
        return waiting is request

    def has_admitted(self, request: JoinRequest) -> bool:
        """Whether this very request is in the latest generation."""
        return self.admitted.get(request.worker) is request

    def report_lost(self, worker: str, now: float) -> None:
        """The process of `worker` is gone, or is treated so; it would have to join again."""
        self.has_lost |= worker in self.alive
        self.backoff.record_loss(worker, now)
        self.lost.add(worker)
        self.draining.discard(worker)
        self._remove(worker)

    def stall(self, now: float) -> None:
        """All members of the generation wait for each other, for too long: they should join again."""
        self.stalled_at = now if self.stalled_at is None else self.stalled_at

    def drain(self, worker: str) -> bool:
        """Asks `worker` to leave at its next step boundary; returns whether it has state, so that it must be waited for."""
        request, _ = self.waiting.get(worker, (None, 0.0))
        if worker in self.alive or (request is not None and request.step != NO_STATE):
            self.draining.add(worker)
            return True
        self._remove(worker)
        return False

    def release_drained(self) -> set[str]:
        """Removes and returns the draining workers that may leave now because no state is lost with them."""
        if not self.draining or not self.all_have_joined:
            return set()
        leaving = self.draining & self.waiting.keys()
        best = max((self.waiting[worker][0].step for worker in leaving), default=NO_STATE)
        is_saved = any(self.waiting[worker][0].is_saved for worker in leaving if self.waiting[worker][0].step == best)
        staying = max((r.step for r, _ in self.waiting.values() if r.worker not in leaving), default=NO_STATE)
        is_kept = staying >= best or (is_saved and staying == NO_STATE)  # a staying worker with an older state would lead
        if not is_kept:
            return set()
        for worker in leaving:
            self._remove(worker)
        self.draining -= leaving
        self.has_drained |= bool(leaving)
        return leaving

    def recover(self, generation: Generation) -> None:
        """Takes over a generation that trains, after a restart of the rendezvous; ignores an older one."""
        if generation.number > self.generation.number:
            self.generation, self.stalled_at = generation, None
            self.alive = {member.worker for member in generation.members} - self.lost
            self.has_lost |= len(self.alive) < len(generation.members)

    @property
    def all_have_joined(self) -> bool:
        """Whether all living members have joined again."""
        return len(self.alive) <= len(self.waiting) and self.alive <= self.waiting.keys()

    def overdue(self, now: float, after_s: float) -> frozenset[str]:
        """Living members that have not joined `after_s` seconds after the first other member did, or after they stalled."""
        arrivals = [self.waiting[worker][1] for worker in self.alive & self.waiting.keys()]
        arrivals += [] if self.stalled_at is None else [self.stalled_at]
        return frozenset(self.alive - self.waiting.keys() if arrivals and now - min(arrivals) >= after_s else ())

    @property
    def to_probe(self) -> list[str]:
        """Workers whose death would change the next generation: all of them while somebody waits."""
        return sorted(self.alive | self.waiting.keys()) if self.candidates or self.alive & self.waiting.keys() else []

    @property
    def candidates(self) -> set[str]:
        """Newcomers for whom there is room in the next generation, or will be for some of them."""
        return self.waiting.keys() - self.alive if len(self.alive) < self.max_workers else set()

    @property
    def is_broken(self) -> bool:
        """Whether the latest generation has lost a member, or gets on no more."""
        return len(self.alive) < len(self.generation.members) or self.stalled_at is not None

    def signals(self, now: float) -> Signals:
        """What the members should do after their step."""
        must_save = bool(self.alive) and self.alive <= self.draining
        regroup = bool(self.draining) or self.should_admit(now)
        return Signals(regroup=regroup, save=must_save, stop=self.stop_requested, drain=bool(self.draining))

    def should_admit(self, now: float) -> bool:
        """Whether the members should regroup after their step because newcomers wait."""
        arrivals = [arrival for _, arrival in self._admissible(now)]
        return bool(arrivals) and (not self.starting or now - min(arrivals) >= self.settle_s)

    def form(self, now: float) -> Generation | None:
        """Forms and returns the next generation if that is possible now."""
        if self.closed or not self.waiting or not self.all_have_joined:
            return None
        oldest = min(arrival for _, arrival in self.waiting.values())
        if not self.alive and self.starting and now - oldest < self.settle_s:
            return None  # nobody trains yet, so it costs nothing to start together
        members = [self.waiting[worker][0] for worker in self.alive] + [request for request, _ in self._admissible(now)]
        best = max(request.step for request, _ in self.waiting.values())
        if len(members) < self.min_workers or max(member.step for member in members) < best:
            requests = sorted((request for request, _ in self.waiting.values()), key=lambda request: -request.step)
            members = requests[: self.max_workers]
        holds_state = bool(self.draining & self.waiting.keys())  # `release_drained` would have released it otherwise
        if len(members) < self.min_workers and not holds_state:
            self.short_since = now if self.short_since is None else self.short_since
            return None
        return self._form(members, now)

    def _form(self, requests: list[JoinRequest], now: float) -> Generation:
        ranks = {member.worker: rank for rank, member in enumerate(self.generation.members)}
        members = sorted(requests, key=lambda r: (-r.step, ranks.get(r.worker, len(ranks)), len(r.worker), r.worker))
        number = max(self.generation.number, *(member.last_generation for member in members)) + 1
        waited_s = 0.0 if self.short_since is None else now - self.short_since
        self.generation = Generation(
            number, tuple(members), self._cause(members), waited_s, self._timeout_factor(members), self.max_step
        )
        self.admitted = {member.worker: member for member in members}
        self.alive = set(self.admitted)
        for member in members:
            self.backoff.record_admission(member.worker, member.node_id, now)
            del self.waiting[member.worker]
        self.has_lost, self.has_drained, self.short_since, self.stalled_at = False, False, None, None
        return self.generation

    def _admissible(self, now: float) -> list[tuple[JoinRequest, float]]:
        """As many newcomers as there is room for, with their times of arrival, without those whose node is in back-off."""
        found = [
            (request, arrival)
            for request, arrival in (self.waiting[worker] for worker in sorted(self.candidates))
            if now - arrival >= self.backoff.delay_s(request.node_id)
        ]
        return sorted(found, key=lambda each: each[1])[: self.max_workers - len(self.alive)]

    def _timeout_factor(self, members: list[JoinRequest]) -> int:
        previous = self.generation
        is_false_alarm = {m.worker for m in members} == {m.worker for m in previous.members} and bool(previous.members)
        if is_false_alarm and not self.has_lost and members[0].step == max(m.step for m in previous.members):
            return min(MAX_TIMEOUT_FACTOR, 2 * previous.timeout_factor)
        return previous.timeout_factor if is_false_alarm else 1

    def _cause(self, members: list[JoinRequest]) -> str:
        if not self.generation.number:
            return "start"
        has_newcomers = any(member.worker not in self.alive for member in members)
        if self.has_lost or self.has_drained:
            return "loss" if self.has_lost else "drain"
        return "join" if has_newcomers else "retry"

    def _remove(self, worker: str) -> None:
        self.starting.discard(worker)
        self.alive.discard(worker)
        self.waiting.pop(worker, None)
