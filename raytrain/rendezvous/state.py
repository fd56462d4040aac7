"""Who trains together next? The decisions of the rendezvous, as a state machine without clocks, threads or Ray.

A worker enters at a step boundary and leaves with the next generation. A generation forms when every living member of
the previous one has entered and there are enough workers. The worker furthest ahead leads it: its state is the state of
the run. Whoever carries this object (an actor, or a test) tells it what happened and when.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raytrain.rendezvous.flapping import Flapping
from raytrain.rendezvous.generation import NO_STATE, NOBODY, Entrant, Generation, Signals

__all__ = ["NOBODY", "NO_STATE", "Entrant", "Generation", "Rendezvous", "Signals"]

LONGEST_PATIENCE = 64


@dataclass
class Rendezvous:
    """The state machine.

    Args:
        min_workers: the smallest generation.
        settle_s: how long arrivals are collected, while more workers are known to be starting, before they are let in.
    """

    min_workers: int
    settle_s: float = 1.0
    generation: Generation = field(default_factory=lambda: Generation(0, (), "start"))
    waiting: dict[str, tuple[Entrant, float]] = field(default_factory=dict)
    """Entrants with their times of arrival in seconds."""
    starting: set[str] = field(default_factory=set)
    """Workers whose processes run but that have not entered yet."""
    admitted: dict[str, Entrant] = field(default_factory=dict)
    """Members of the latest generation that was formed here."""
    living: set[str] = field(default_factory=set)
    """Members of the generation that are not known to be dead."""
    leaving: set[str] = field(default_factory=set)
    """Workers whose nodes are announced to go away, until they have left."""
    gone: set[str] = field(default_factory=set)
    """Workers that were lost, and have not entered again."""
    someone_died: bool = False
    someone_left: bool = False
    stop_asked: bool = False
    closed: bool = False
    short_since: float | None = None
    """Since when there are too few at the door although everybody is there."""
    reached: int = NO_STATE
    """The most finished steps that anybody has told of."""
    flapping: Flapping = field(default_factory=Flapping)

    def start(self, worker: str) -> None:
        """A worker's process runs and will enter soon."""
        self.starting.add(worker)

    def enter(self, entrant: Entrant, now: float) -> None:
        self.starting.discard(entrant.worker)
        self.gone.discard(entrant.worker)
        self.reached = max(self.reached, entrant.step)
        self.waiting[entrant.worker] = (entrant, now)

    def is_waiting(self, entrant: Entrant) -> bool:
        """Whether this very arrival still waits: a worker that comes twice may say the same of itself."""
        one, _ = self.waiting.get(entrant.worker, (None, 0.0))
        return one is entrant

    def has_admitted(self, entrant: Entrant) -> bool:
        """Whether this very arrival is in the latest generation."""
        return self.admitted.get(entrant.worker) is entrant

    def lose(self, worker: str, now: float) -> None:
        """A worker's process is gone, or must be treated so; it would have to enter again."""
        self.someone_died |= worker in self.living
        self.flapping.lose(worker, now)
        self.gone.add(worker)
        self.leaving.discard(worker)
        self._forget(worker)

    def leave(self, worker: str) -> bool:
        """A worker is to leave at its next step boundary; returns whether it has state, so that this must be waited for."""
        entrant, _ = self.waiting.get(worker, (None, 0.0))
        if worker in self.living or (entrant is not None and entrant.step != NO_STATE):
            self.leaving.add(worker)
            return True
        self._forget(worker)
        return False

    def dismiss(self) -> set[str]:
        """Those at the door that may leave now: nothing is lost with them. They are out of the state machine then."""
        if not self.leaving or not self.are_all_here:
            return set()
        going = self.leaving & self.waiting.keys()
        best = max((self.waiting[worker][0].step for worker in going), default=NO_STATE)
        is_saved = any(self.waiting[worker][0].is_saved for worker in going if self.waiting[worker][0].step == best)
        staying = max((e.step for e, _ in self.waiting.values() if e.worker not in going), default=NO_STATE)
        is_handed_on = staying >= best or (is_saved and staying == NO_STATE)  # who has an older state would go on from that
        if not is_handed_on:
            return set()
        for worker in going:
            self._forget(worker)
        self.leaving -= going
        self.someone_left |= bool(going)
        return going

    def adopt(self, generation: Generation) -> None:
        """Learns, in a state machine that was started anew, of a generation that trains; an older one says nothing."""
        if generation.number > self.generation.number:
            self.generation = generation
            self.living = {member.worker for member in generation.members} - self.gone
            self.someone_died |= len(self.living) < len(generation.members)

    @property
    def are_all_here(self) -> bool:
        """Whether all members have entered again."""
        return len(self.living) <= len(self.waiting) and self.living <= self.waiting.keys()

    @property
    def missing(self) -> set[str]:
        """Members that have not entered again."""
        return self.living - self.waiting.keys()

    def late(self, now: float, after_s: float) -> frozenset[str]:
        """Members that others have waited for at the door for so long, though nobody asked them to come."""
        arrivals = [self.waiting[worker][1] for worker in self.living & self.waiting.keys()]
        return frozenset(self.missing if arrivals and now - min(arrivals) >= after_s else ())

    @property
    def to_ask(self) -> list[str]:
        """Those whose death would change the next generation: everybody, once somebody waits."""
        return sorted(self.living | self.waiting.keys()) if self.waiting else []

    @property
    def newcomers(self) -> set[str]:
        return self.waiting.keys() - self.living

    @property
    def is_broken(self) -> bool:
        """Whether the latest generation has lost a member."""
        return len(self.living) < len(self.generation.members)

    def signals(self, now: float) -> Signals:
        """What the members should do after their step."""
        must_save = bool(self.living) and self.living <= self.leaving
        gather = bool(self.leaving) or self.should_let_in(now)
        return Signals(gather=gather, save=must_save, stop=self.stop_asked, leave=bool(self.leaving))

    def should_let_in(self, now: float) -> bool:
        """Whether the members should come to the door after their step, since newcomers wait."""
        arrivals = [arrival for _, arrival in self._welcome(now)]
        return bool(arrivals) and (not self.starting or now - min(arrivals) >= self.settle_s)

    def form(self, now: float) -> Generation | None:
        """The next generation, if it can form now; the state moves on with it."""
        if self.closed or not self.waiting or not self.are_all_here:
            return None
        oldest = min(arrival for _, arrival in self.waiting.values())
        if not self.living and self.starting and now - oldest < self.settle_s:
            return None  # nobody trains yet, so it costs nothing to begin together
        members = [self.waiting[worker][0] for worker in self.living] + [entrant for entrant, _ in self._welcome(now)]
        best = max(entrant.step for entrant, _ in self.waiting.values())
        if len(members) < self.min_workers or max(member.step for member in members) < best:
            members = [entrant for entrant, _ in self.waiting.values()]
        has_to_hand_on = bool(self.leaving & self.waiting.keys())  # else `dismiss` had let them go
        if len(members) < self.min_workers and not has_to_hand_on:
            self.short_since = now if self.short_since is None else self.short_since
            return None
        return self._form(members, now)

    def _form(self, entrants: list[Entrant], now: float) -> Generation:
        ranks = {member.worker: rank for rank, member in enumerate(self.generation.members)}
        members = sorted(entrants, key=lambda e: (-e.step, ranks.get(e.worker, len(ranks)), len(e.worker), e.worker))
        number = max(self.generation.number, *(member.after for member in members)) + 1
        waited_s = 0.0 if self.short_since is None else now - self.short_since
        self.generation = Generation(
            number, tuple(members), self._cause(members), waited_s, self._patience(members), self.reached
        )
        self.admitted = {member.worker: member for member in members}
        self.living = set(self.admitted)
        for member in members:
            self.flapping.admit(member.worker, member.node_id, now)
            del self.waiting[member.worker]
        self.someone_died, self.someone_left, self.short_since = False, False, None
        return self.generation

    def _welcome(self, now: float) -> list[tuple[Entrant, float]]:
        """Newcomers that are let in, with their times of arrival: those from flapping nodes wait a while."""
        return [
            (entrant, arrival)
            for entrant, arrival in (self.waiting[worker] for worker in sorted(self.newcomers))
            if now - arrival >= self.flapping.wait_s(entrant.node_id)
        ]

    def _patience(self, members: list[Entrant]) -> int:
        before = self.generation
        is_false_alarm = {m.worker for m in members} == {m.worker for m in before.members} and bool(before.members)
        if is_false_alarm and not self.someone_died and members[0].step == max(m.step for m in before.members):
            return min(LONGEST_PATIENCE, 2 * before.patience)
        return before.patience if is_false_alarm else 1

    def _cause(self, members: list[Entrant]) -> str:
        if not self.generation.number:
            return "start"
        has_newcomers = any(member.worker not in self.living for member in members)
        if self.someone_died or not (has_newcomers or self.someone_left):
            return "loss"
        return "drain" if self.someone_left else "join"

    def _forget(self, worker: str) -> None:
        self.starting.discard(worker)
        self.living.discard(worker)
        self.waiting.pop(worker, None)
