"""Who trains together next? The decisions of the rendezvous, as a state machine without clocks, threads or Ray.

A worker enters at a step boundary and leaves with the next generation. A generation forms when every living member of
the previous one has entered and there are enough workers. The worker furthest ahead leads it: its state is the state of
the run. Whoever carries this object (an actor, or a test) tells it what happened and when.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NO_STATE = -1
"""The step of an entrant that has no training state in memory yet."""


@dataclass(frozen=True)
class Entrant:
    """A worker at the door.

    Args:
        worker: its identity, for as long as its process lives.
        step: finished steps of the state in its memory, or NO_STATE.
        store: host and port of the TCPStore that it serves.
        node: the address of its node, for people.
        pid: its process.
    """

    worker: str
    step: int
    store: tuple[str, int]
    node: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Generation:
    """Workers that train together in one process group, in the order of their ranks; the first one leads."""

    number: int
    members: tuple[Entrant, ...]
    cause: str
    """"start", "loss" or "join"."""

    def has(self, worker: str) -> bool:
        return any(member.worker == worker for member in self.members)

    def rank_of(self, worker: str) -> int:
        return [member.worker for member in self.members].index(worker)


NOBODY = Generation(0, (), "")
"""The answer to a worker that was taken for dead while it waited: it may enter again."""


@dataclass
class Rendezvous:
    """The state machine.

    Args:
        min_workers: the smallest generation.
        settle_s: how long arrivals are collected, while more workers are known to be starting, before they are let in.
        patience_s: how long members wait at the door for one that lives but does not come.
    """

    min_workers: int
    settle_s: float = 1.0
    patience_s: float = 60.0
    generation: Generation = field(default_factory=lambda: Generation(0, (), "start"))
    waiting: dict[str, tuple[Entrant, float]] = field(default_factory=dict)
    """Entrants with their times of arrival in seconds."""
    starting: set[str] = field(default_factory=set)
    """Workers whose processes run but that have not entered yet."""
    living: set[str] = field(default_factory=set)
    """Members of the generation that are not known to be dead."""
    someone_died: bool = False
    stop_asked: bool = False
    closed: bool = False

    def start(self, worker: str) -> None:
        """A worker's process runs and will enter soon."""
        self.starting.add(worker)

    def enter(self, entrant: Entrant, now: float) -> None:
        self.starting.discard(entrant.worker)
        self.waiting[entrant.worker] = (entrant, now)

    def is_waiting(self, entrant: Entrant) -> bool:
        """Whether this very arrival still waits: a worker that comes twice may say the same of itself."""
        return any(one is entrant for one, _ in self.waiting.values())

    def has_admitted(self, entrant: Entrant) -> bool:
        """Whether this very arrival is in the latest generation."""
        return any(one is entrant for one in self.generation.members)

    def lose(self, worker: str) -> None:
        """A worker's process is gone, or must be treated so; it would have to enter again."""
        self.someone_died |= worker in self.living
        self.starting.discard(worker)
        self.living.discard(worker)
        self.waiting.pop(worker, None)

    @property
    def missing(self) -> set[str]:
        """Members that have not entered again."""
        return self.living - self.waiting.keys()

    def overdue(self, now: float) -> set[str]:
        """Members that others have waited for too long: stopped, cut off, or stuck. They should be killed, and lost."""
        arrivals = [self.waiting[worker][1] for worker in self.living & self.waiting.keys()]
        return self.missing if arrivals and now - min(arrivals) >= self.patience_s else set()

    @property
    def to_ask(self) -> list[str]:
        """Those whose death would change the next generation: everybody, once somebody waits."""
        return sorted(self.living | self.waiting.keys()) if self.waiting else []

    @property
    def newcomers(self) -> set[str]:
        return self.waiting.keys() - self.living

    def should_let_in(self, now: float) -> bool:
        """Whether the members should come to the door after their step, since newcomers wait."""
        arrivals = [self.waiting[worker][1] for worker in self.newcomers]
        return bool(arrivals) and (not self.starting or now - min(arrivals) >= self.settle_s)

    def form(self, now: float) -> Generation | None:
        """The next generation, if it can form now; the state moves on with it."""
        if self.closed or self.missing or len(self.waiting) < self.min_workers:
            return None
        first_arrival = min(arrival for _, arrival in self.waiting.values())
        if not self.living and self.starting and now - first_arrival < self.settle_s:
            return None  # nobody trains yet, so it costs nothing to begin together
        ranks = {member.worker: rank for rank, member in enumerate(self.generation.members)}
        members = sorted(
            (entrant for entrant, _ in self.waiting.values()),
            key=lambda e: (-e.step, ranks.get(e.worker, len(ranks)), len(e.worker), e.worker),
        )
        self.generation = Generation(self.generation.number + 1, tuple(members), self._cause())
        self.living = {member.worker for member in members}
        self.waiting, self.someone_died = {}, False
        return self.generation

    def _cause(self) -> str:
        if not self.generation.number:
            return "start"
        return "loss" if self.someone_died or not self.newcomers else "join"
