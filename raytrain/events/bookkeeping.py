"""How do the events of a run add up to its ledger? A pure, incremental reducer of bounded size; reads no clock.

Time is settled from one finished step to the next: what else is known of that stretch (data wait, evaluation, checkpoint
stall, the parts of a pause) is a claim on it, never on more than there is, and the rest is training. So the sum of the
classes is the wall time, whatever the events say and in which order they come. Runs in any process that shows a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce as fold_left
from functools import singledispatch

from raytrain.events import kinds
from raytrain.events.ledger import Ledger, settle, spend


@dataclass(frozen=True)
class Books:
    """A ledger that is being kept; of bounded size. Times are Unix seconds."""

    settled: Ledger = field(default_factory=Ledger)
    """Of all sessions, up to `since`."""
    sessions: int = 0
    is_open: bool = False
    """Whether a session goes on, as far as the events tell."""
    since: float = 0.0
    """The last finished step of this session, or its first generation, or its start."""
    seen: float = 0.0
    """The latest moment in this session that an event told of."""
    claims: Ledger = field(default_factory=Ledger)
    """What is known of the stretch after `since`."""
    has_formed: bool = False
    is_restored: bool = False
    """The state was read from storage after `since`, so no worker remembers the last step."""
    members: frozenset[str] = frozenset()
    lost_at: float = -math.inf
    """When the generation lost a member; of no meaning before `since`, as the next two."""
    short_at: float = -math.inf
    """When there were known to be too few workers."""
    saved_at: float = -math.inf
    """When the latest checkpoint was written, or given up."""
    num_steps: int = 0
    step: int = 0
    """Finished steps."""
    highest: int = 0
    """The most finished steps that there ever were."""
    new_from: int = 0
    """Steps from this one on were never finished before."""

    def at(self, now: float | None = None) -> Ledger:
        """The ledger as of `now`, in Unix seconds; None: as of the last event."""
        if not self.is_open:
            return self.settled
        end = self.seen if now is None else max(self.seen, now)
        return self._up_to(end, "training_s" if self.step >= self.new_from else "redoing_s")

    def ended(self) -> Books:
        """The books after the death of a driver that could not say so: its session ends at its last event."""
        return replace(self, settled=self._up_to(self.seen, "redoing_s"), is_open=False) if self.is_open else self

    def _up_to(self, end: float, in_flight: str) -> Ledger:
        """The ledger with the stretch from `since` to `end`; `in_flight` is the class of a step that is not finished."""
        claims, rest = _tail(self, in_flight)
        return settle(self.settled, claims, end - self.since, rest)


def reduce(books: Books, event: kinds.Event) -> Books:
    """The books after one more event. Between two sessions nothing counts."""
    if isinstance(event, kinds.RunStarted):
        return _start(books.ended(), event)
    if not books.is_open:
        return books
    return _reduce(event, replace(books, seen=max(books.seen, _moment(event, books))))


def fold(events: Iterable[kinds.Event], books: Books | None = None) -> Books:
    """The books after all events."""
    return fold_left(reduce, events, books or Books())


def _start(books: Books, event: kinds.RunStarted) -> Books:
    kept = Books(settled=books.settled, sessions=books.sessions + 1, highest=books.highest, new_from=books.highest)
    start = _moment(event, books)
    return replace(kept, is_open=True, since=start, seen=start, num_steps=event.num_steps)


@singledispatch
def _reduce(event: kinds.Event, books: Books) -> Books:
    return books


@_reduce.register
def _(event: kinds.StateRestored, books: Books) -> Books:
    return replace(books, step=event.step, new_from=books.highest, is_restored=True)


@_reduce.register
def _(event: kinds.GenerationFormed, books: Books) -> Books:
    books = replace(books, members=frozenset(m.worker for m in event.members), lost_at=-math.inf, short_at=-math.inf)
    formed = max(books.since, _moment(event, books))
    if not books.has_formed:
        settled = settle(books.settled, books.claims, formed - books.since, "starting_s")
        return replace(books, settled=settled, since=formed, claims=Ledger(), has_formed=True)
    if not books.is_restored and _positive(event.pause_s):
        formed = min(formed, books.since + event.pause_s)  # exact, while the event may have waited to be sent
    return replace(books, claims=_pause(event, books.claims, formed - books.since))


def _pause(event: kinds.GenerationFormed, claims: Ledger, pause_s: float) -> Ledger:
    """The claims on a pause, from the last finished step on, also if other generations failed before one could train."""
    before_s = claims.evaluation_s + claims.checkpoint_stall_s
    parts = {
        # The leader counts from its last step, so what was due after that step is in its time.
        "detecting_s": max(0.0, _positive(event.detecting_s) - before_s),
        "waiting_s": _positive(event.waiting_s),
        "redoing_s": _positive(event.redone_s),
    }
    return replace(claims, **parts, reforming_s=max(0.0, pause_s - before_s - sum(parts.values())))


@_reduce.register
def _(event: kinds.WorkerLost, books: Books) -> Books:
    return replace(books, lost_at=_moment(event, books)) if event.worker in books.members else books


@_reduce.register
def _(event: kinds.WaitingForWorkers, books: Books) -> Books:
    return books if books.short_at >= books.since else replace(books, short_at=_moment(event, books))


@_reduce.register
def _(event: kinds.StepsDone, books: Books) -> Books:
    if not event.finished:
        return books
    step = max(books.step, event.first_step + len(event.finished))
    books = replace(books, step=step, highest=max(books.highest, step))
    settled, since = _train(books, event)
    if since == books.since:
        return books
    return replace(
        books,
        settled=settled,
        since=since,
        seen=max(books.seen, since),
        claims=Ledger(),
        has_formed=True,
        is_restored=False,
    )


def _train(books: Books, event: kinds.StepsDone) -> tuple[Ledger, float]:
    """The ledger up to the last of the steps, and when that was."""
    settled, claims, since = books.settled.seconds(), books.claims.known(), books.since
    waits = event.data_waits if len(event.data_waits) == len(event.finished) else [0.0] * len(event.finished)
    for step, (finished, data_wait_s) in enumerate(zip(event.finished, waits, strict=True), event.first_step):
        if since < finished < math.inf:  # else told before, or by a clock that is behind
            claims["data_wait_s"] = _positive(data_wait_s)
            rest = "training_s" if step >= books.new_from else "redoing_s"
            has_formed = books.has_formed or since > books.since
            spend(settled, claims, finished - since, rest if has_formed else "starting_s")
            since, claims = finished, {}
    return Ledger(**settled), since


@_reduce.register
def _(event: kinds.EvaluationDone, books: Books) -> Books:
    claims = books.claims
    return replace(books, claims=replace(claims, evaluation_s=claims.evaluation_s + _positive(event.seconds)))


@_reduce.register
def _(event: kinds.CheckpointSaved, books: Books) -> Books:
    books, stall_s = replace(books, saved_at=_moment(event, books)), _positive(event.stall_s)
    if event.step >= books.step:
        claims = books.claims
        return replace(books, claims=replace(claims, checkpoint_stall_s=claims.checkpoint_stall_s + stall_s))
    # It was written behind the back of training: the step during which training stood still is settled already.
    settled = books.settled.seconds()
    name = "training_s" if event.step >= books.new_from else "redoing_s"
    stall_s = min(stall_s, settled[name])
    settled[name] -= stall_s
    settled["checkpoint_stall_s"] += stall_s
    return replace(books, settled=Ledger(**settled))


@_reduce.register
def _(event: kinds.CheckpointFailed, books: Books) -> Books:
    return replace(books, saved_at=_moment(event, books))


@_reduce.register
def _(event: kinds.RunEnded, books: Books) -> Books:
    return replace(books, settled=books._up_to(books.seen, "stopping_s"), is_open=False)


def _tail(books: Books, in_flight: str) -> tuple[Ledger, str]:
    """What the time after the last finished step is spent on: the known parts of it, and the class of the rest."""
    claims, is_done = books.claims, 0 < books.num_steps <= books.step
    claimed_until = books.since + sum(claims.seconds().values())
    if not books.has_formed:
        return claims, "starting_s"
    if not is_done and books.short_at >= books.since:
        before_s = max(0.0, books.short_at - claimed_until)
        return replace(claims, reforming_s=claims.reforming_s + before_s), "waiting_s"
    if not is_done and books.lost_at >= books.since:
        return claims, "reforming_s"
    if in_flight == "stopping_s" or (is_done and books.saved_at >= books.since):
        saving_s = max(0.0, books.saved_at - claimed_until)
        return replace(claims, checkpoint_stall_s=claims.checkpoint_stall_s + saving_s), "stopping_s"
    return claims, "checkpoint_stall_s" if is_done else in_flight


def _moment(event: kinds.Event, books: Books) -> float:
    """When an event was; one that does not tell a time was at the latest moment known."""
    return event.time if math.isfinite(event.time) and event.time else books.seen


def _positive(seconds: float) -> float:
    return seconds if 0.0 < seconds < math.inf else 0.0
