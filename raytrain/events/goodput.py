"""Where does the wall time of a run go? The ledger of its classes, and the account that adds events up to a ledger.

A session starts at RunStarted and ends at RunEnded. Without RunEnded (a killed driver) it ends at the last event before
the next RunStarted, and a running one at the caller's `now`. Wall time is the sum of the sessions. Time is accounted
from one finished step to the next: known parts (data wait, evaluation, checkpoint stall, the parts of a pause) are
attributed first, never more than there is, and the rest is training. So the classes always add up to the wall time.

`reduce` is a pure, incremental function of bounded memory; it reads no clock. Runs in any process that shows a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce as fold_left
from functools import singledispatch

from raytrain.events import kinds

Seconds = dict[str, float]
"""Seconds by class: some or all fields of a `Ledger`."""


@dataclass(frozen=True)
class Ledger:
    """Seconds of wall time by class."""

    starting_s: float = 0.0
    """From RunStarted to the first generation of each session."""
    training_s: float = 0.0
    """Steps that finished for the first time."""
    data_wait_s: float = 0.0
    """The leader waited for data."""
    evaluation_s: float = 0.0
    checkpoint_stall_s: float = 0.0
    """Training was blocked by a checkpoint; includes the wait for the last checkpoint after the last step."""
    detecting_s: float = 0.0
    """Until a worker failure was noticed, beyond the time of a step."""
    reforming_s: float = 0.0
    """No generation trained, and no other class explains it."""
    waiting_s: float = 0.0
    """There were fewer than `min_workers` workers."""
    redoing_s: float = 0.0
    """Steps in flight that were lost, and steps repeated after an older checkpoint was restored."""
    stopping_s: float = 0.0
    """From the last step, or the checkpoint after it, to RunEnded."""

    @property
    def wall_s(self) -> float:
        return math.fsum(self.seconds().values())

    @property
    def goodput(self) -> float:
        """Training time / wall time, 0 to 1; 0 for an empty ledger."""
        wall_s = self.wall_s
        return self.training_s / wall_s if wall_s else 0.0

    def seconds(self) -> Seconds:
        """All classes, in the order of the fields."""
        return dict(vars(self))

    def known(self) -> Seconds:
        """The classes with nonzero time."""
        return {name: seconds for name, seconds in vars(self).items() if seconds}


TITLES = {
    "starting_s": "starting",
    "training_s": "training",
    "data_wait_s": "data wait",
    "evaluation_s": "evaluation",
    "checkpoint_stall_s": "checkpoint stall",
    "detecting_s": "detecting",
    "reforming_s": "re-forming",
    "waiting_s": "waiting for workers",
    "redoing_s": "redoing",
    "stopping_s": "stopping",
}
"""Display names of the classes."""


def account(accounted: Ledger, attributed: Ledger, interval_s: float, rest: str) -> Ledger:
    """The ledger plus an interval: each attributed part gets what is left of it, class `rest` gets the remainder."""
    seconds = accounted.seconds()
    _add(seconds, attributed.known(), interval_s, rest)
    return Ledger(**seconds)


def _add(accounted: Seconds, attributed: Seconds, interval_s: float, rest: str) -> None:
    """Same as `account`, in place, for many intervals in a row."""
    left_s = max(0.0, interval_s)
    for name, attributed_s in attributed.items():
        part_s = min(attributed_s, left_s)
        accounted[name] += part_s
        left_s -= part_s
    accounted[rest] += left_s


@dataclass(frozen=True)
class GoodputAccount:
    """The ledger so far, and what is needed to continue it. Times are Unix seconds."""

    accounted: Ledger = field(default_factory=Ledger)
    """All sessions up to `since`."""
    sessions: int = 0
    is_open: bool = False
    """Whether a session is running, as far as the events show."""
    since: float = 0.0
    """Time of the last finished step of this session, else of its first generation, else of its start."""
    seen: float = 0.0
    """Latest time in this session that an event mentions."""
    attributed: Ledger = field(default_factory=Ledger)
    """Known parts of the interval after `since`."""
    has_formed: bool = False
    is_restored: bool = False
    """A checkpoint was restored after `since`, so no worker remembers the last step."""
    members: frozenset[str] = frozenset()
    lost_at: float = -math.inf
    """When the generation lost a member; ignored if before `since`, as the next two."""
    short_at: float = -math.inf
    """When too few workers were first reported."""
    saved_at: float = -math.inf
    """When the latest checkpoint was saved or failed."""
    num_steps: int = 0
    step: int = 0
    """Finished steps."""
    highest: int = 0
    """Maximum of `step` over the whole run."""
    new_from: int = 0
    """Steps from this one on have never finished before."""

    def at(self, now: float | None = None) -> Ledger:
        """The ledger as of `now` (Unix seconds); None: as of the last event."""
        if not self.is_open:
            return self.accounted
        end = self.seen if now is None else max(self.seen, now)
        return self._up_to(end, "training_s" if self.step >= self.new_from else "redoing_s")

    def closed(self) -> GoodputAccount:
        """The account of a killed driver: its session ends at its last event."""
        return replace(self, accounted=self._up_to(self.seen, "redoing_s"), is_open=False) if self.is_open else self

    def _up_to(self, end: float, in_flight: str) -> Ledger:
        """The ledger including the interval from `since` to `end`; `in_flight` is the class of an unfinished step."""
        attributed, rest = _tail(self, in_flight)
        return account(self.accounted, attributed, end - self.since, rest)


def reduce(before: GoodputAccount, event: kinds.Event) -> GoodputAccount:
    """The account after one more event. Events between two sessions are ignored."""
    if isinstance(event, kinds.RunStarted):
        return _start(before.closed(), event)
    if not before.is_open:
        return before
    return _reduce(event, replace(before, seen=max(before.seen, _moment(event, before))))


def fold(events: Iterable[kinds.Event], before: GoodputAccount | None = None) -> GoodputAccount:
    """The account after all events."""
    return fold_left(reduce, events, before or GoodputAccount())


def _start(before: GoodputAccount, event: kinds.RunStarted) -> GoodputAccount:
    kept = GoodputAccount(
        accounted=before.accounted, sessions=before.sessions + 1, highest=before.highest, new_from=before.highest
    )
    start = _moment(event, before)
    return replace(kept, is_open=True, since=start, seen=start, num_steps=event.num_steps)


@singledispatch
def _reduce(event: kinds.Event, before: GoodputAccount) -> GoodputAccount:
    return before


@_reduce.register
def _(event: kinds.StateRestored, before: GoodputAccount) -> GoodputAccount:
    return replace(before, step=event.step, new_from=before.highest, is_restored=True)


@_reduce.register
def _(event: kinds.GenerationFormed, before: GoodputAccount) -> GoodputAccount:
    before = replace(before, members=frozenset(m.worker for m in event.members), lost_at=-math.inf, short_at=-math.inf)
    formed = max(before.since, _moment(event, before))
    if not before.has_formed:
        accounted = account(before.accounted, before.attributed, formed - before.since, "starting_s")
        return replace(before, accounted=accounted, since=formed, attributed=Ledger(), has_formed=True)
    if not before.is_restored and _positive(event.pause_s):
        formed = min(formed, before.since + event.pause_s)  # exact, while the event may have waited to be sent
    return replace(before, attributed=_pause(event, before.attributed, formed - before.since))


def _pause(event: kinds.GenerationFormed, attributed: Ledger, pause_s: float) -> Ledger:
    """The parts of a pause since the last finished step, including generations that failed before they trained."""
    before_s = attributed.evaluation_s + attributed.checkpoint_stall_s
    parts = {
        # The leader measures from its last step, so this includes an evaluation or a stall after that step.
        "detecting_s": max(0.0, _positive(event.detecting_s) - before_s),
        "waiting_s": _positive(event.waiting_s),
        "redoing_s": _positive(event.redone_s),
    }
    return replace(attributed, **parts, reforming_s=max(0.0, pause_s - before_s - sum(parts.values())))


@_reduce.register
def _(event: kinds.WorkerLost, before: GoodputAccount) -> GoodputAccount:
    return replace(before, lost_at=_moment(event, before)) if event.worker in before.members else before


@_reduce.register
def _(event: kinds.WaitingForWorkers, before: GoodputAccount) -> GoodputAccount:
    return before if before.short_at >= before.since else replace(before, short_at=_moment(event, before))


@_reduce.register
def _(event: kinds.StepsDone, before: GoodputAccount) -> GoodputAccount:
    if not event.finished:
        return before
    step = max(before.step, event.first_step + len(event.finished))
    before = replace(before, step=step, highest=max(before.highest, step))
    accounted, since = _train(before, event)
    if since == before.since:
        return before
    return replace(
        before,
        accounted=accounted,
        since=since,
        seen=max(before.seen, since),
        attributed=Ledger(),
        has_formed=True,
        is_restored=False,
    )


def _train(before: GoodputAccount, event: kinds.StepsDone) -> tuple[Ledger, float]:
    """The ledger up to the last of the steps, and the time of that step."""
    accounted, attributed, since = before.accounted.seconds(), before.attributed.known(), before.since
    waits = event.data_waits if len(event.data_waits) == len(event.finished) else [0.0] * len(event.finished)
    for step, (finished, data_wait_s) in enumerate(zip(event.finished, waits, strict=True), event.first_step):
        if since < finished < math.inf:  # else a repeated report, or a clock that is behind
            attributed["data_wait_s"] = _positive(data_wait_s)
            rest = "training_s" if step >= before.new_from else "redoing_s"
            has_formed = before.has_formed or since > before.since
            _add(accounted, attributed, finished - since, rest if has_formed else "starting_s")
            since, attributed = finished, {}
    return Ledger(**accounted), since


@_reduce.register
def _(event: kinds.EvaluationDone, before: GoodputAccount) -> GoodputAccount:
    attributed = before.attributed
    return replace(before, attributed=replace(attributed, evaluation_s=attributed.evaluation_s + _positive(event.seconds)))


@_reduce.register
def _(event: kinds.CheckpointSaved, before: GoodputAccount) -> GoodputAccount:
    before, stall_s = replace(before, saved_at=_moment(event, before)), _positive(event.stall_s)
    if event.step >= before.step:
        attributed = before.attributed
        return replace(before, attributed=replace(attributed, checkpoint_stall_s=attributed.checkpoint_stall_s + stall_s))
    # The checkpoint was written in the background: the step that it blocked is already accounted.
    accounted = before.accounted.seconds()
    name = "training_s" if event.step >= before.new_from else "redoing_s"
    stall_s = min(stall_s, accounted[name])
    accounted[name] -= stall_s
    accounted["checkpoint_stall_s"] += stall_s
    return replace(before, accounted=Ledger(**accounted))


@_reduce.register
def _(event: kinds.CheckpointFailed, before: GoodputAccount) -> GoodputAccount:
    return replace(before, saved_at=_moment(event, before))


@_reduce.register
def _(event: kinds.RunEnded, before: GoodputAccount) -> GoodputAccount:
    return replace(before, accounted=before._up_to(before.seen, "stopping_s"), is_open=False)


def _tail(before: GoodputAccount, in_flight: str) -> tuple[Ledger, str]:
    """The known parts of the time after the last finished step, and the class of the rest."""
    attributed, is_done = before.attributed, 0 < before.num_steps <= before.step
    attributed_until = before.since + sum(attributed.seconds().values())
    if not before.has_formed:
        return attributed, "starting_s"
    if not is_done and before.short_at >= before.since:
        before_s = max(0.0, before.short_at - attributed_until)
        return replace(attributed, reforming_s=attributed.reforming_s + before_s), "waiting_s"
    if not is_done and before.lost_at >= before.since:
        return attributed, "reforming_s"
    if in_flight == "stopping_s" or (is_done and before.saved_at >= before.since):
        saving_s = max(0.0, before.saved_at - attributed_until)
        return replace(attributed, checkpoint_stall_s=attributed.checkpoint_stall_s + saving_s), "stopping_s"
    return attributed, "checkpoint_stall_s" if is_done else in_flight


def _moment(event: kinds.Event, before: GoodputAccount) -> float:
    """Time of an event; the latest known time if the event has none."""
    return event.time if math.isfinite(event.time) and event.time else before.seen


def _positive(seconds: float) -> float:
    return seconds if 0.0 < seconds < math.inf else 0.0
