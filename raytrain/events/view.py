"""What does a viewer show of a run? A value of bounded size, reduced from the events.

`reduce` is a pure function and runs in any process that shows a run. It formats nothing; that is done by the viewers.
The complete curve, step by step, is in `curve`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce as fold_left
from functools import singledispatch

from raytrain.events import goodput, kinds
from raytrain.events.goodput import GoodputAccount
from raytrain.events.messages import describe

HISTORY_POINTS = 512  # of the loss curve; if exceeded, every second point is dropped
SPEED_WINDOW_S = 10.0  # window for throughput and remaining time, of at least two and at most HISTORY_POINTS steps
KEPT_NOTES = 32
KEPT_EVALUATIONS = 64


@dataclass(frozen=True)
class Note:
    """A notable event: Unix time in seconds, and its message."""

    time: float
    text: str


@dataclass(frozen=True)
class RunView:
    """What viewers show. `step` counts finished steps; None and empty tuples mean "not yet"."""

    run: kinds.RunStarted | None = None
    step: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    history: tuple[tuple[int, float], ...] = ()
    """(step, loss) over the whole run for multiples of `stride`, at most HISTORY_POINTS."""
    stride: int = 1
    recent: tuple[tuple[int, float, int], ...] = ()
    """(step, finish time, rows) of the last steps."""
    generation: int | None = None
    members: tuple[kinds.Member, ...] = ()
    lost: frozenset[str] = frozenset()
    """Members of the current generation that failed."""
    starting: tuple[kinds.WorkerStarting, ...] = ()
    waiting: kinds.WaitingForWorkers | None = None
    evaluations: tuple[kinds.EvaluationDone, ...] = ()
    bests: tuple[kinds.EvaluationDone, ...] = ()
    """Evaluations that set a new best; the last one is the best so far."""
    checkpoint: kinds.CheckpointSaved | None = None
    num_generations: int = 0
    num_lost: int = 0
    num_joins: int = 0
    num_skipped: int = 0
    notes: tuple[Note, ...] = ()
    ended: kinds.RunEnded | None = None
    goodput: GoodputAccount = field(default_factory=GoodputAccount)
    """Where the wall time went."""

    @property
    def state(self) -> str:
        """ "starting", "training", "waiting for workers", or the outcome of the run."""
        if self.ended:
            return self.ended.outcome
        if self.waiting:
            return "waiting for workers"
        return "training" if self.members else "starting"

    @property
    def num_steps(self) -> int:
        return self.run.num_steps if self.run else 0

    @property
    def num_epochs(self) -> int:
        return -(-self.num_steps // self.run.steps_per_epoch) if self.run else 0

    @property
    def epoch(self) -> int:
        """Current epoch, from 1; the last epoch once all steps are finished."""
        return min(self.step // self.run.steps_per_epoch + 1, self.num_epochs) if self.run else 0

    @property
    def evaluation(self) -> kinds.EvaluationDone | None:
        return self.evaluations[-1] if self.evaluations else None

    @property
    def best(self) -> kinds.EvaluationDone | None:
        return self.bests[-1] if self.bests else None

    @property
    def rows_per_s(self) -> float | None:
        """Rows per second over the last SPEED_WINDOW_S seconds."""
        seconds = self._recent_s()
        return sum(rows for _, _, rows in self.recent[1:]) / seconds if seconds else None

    @property
    def left_s(self) -> float | None:
        """Estimated seconds to the last step."""
        seconds = self._recent_s()
        return seconds / (len(self.recent) - 1) * (self.num_steps - self.step) if seconds and self.run else None

    def _recent_s(self) -> float | None:
        return self.recent[-1][1] - self.recent[0][1] if len(self.recent) > 1 else None


def reduce(view: RunView, event: kinds.Event) -> RunView:
    """The view after one more event."""
    text = describe(event)
    notes = (*view.notes, Note(event.time, text))[-KEPT_NOTES:] if text is not None else view.notes
    return replace(_reduce(event, view), notes=notes, goodput=goodput.reduce(view.goodput, event))


def fold(events: Iterable[kinds.Event], view: RunView | None = None) -> RunView:
    """The view after all events."""
    return fold_left(reduce, events, view or RunView())


@singledispatch
def _reduce(event: kinds.Event, view: RunView) -> RunView:
    return view


@_reduce.register
def _(event: kinds.RunStarted, view: RunView) -> RunView:
    return replace(view, run=event, members=(), lost=frozenset(), starting=(), waiting=None, recent=(), ended=None)


@_reduce.register
def _(event: kinds.StateRestored, view: RunView) -> RunView:
    history = tuple(point for point in view.history if point[0] < event.step)
    return replace(
        view,
        step=event.step,
        history=history,
        loss=history[-1][1] if history else None,
        recent=(),
        evaluations=tuple(done for done in view.evaluations if done.step <= event.step),
        bests=tuple(done for done in view.bests if done.step <= event.step),
        checkpoint=view.checkpoint if view.checkpoint and view.checkpoint.step <= event.step else None,
    )


@_reduce.register
def _(event: kinds.GenerationFormed, view: RunView) -> RunView:
    names = {member.worker for member in event.members}
    return replace(
        view,
        generation=event.generation,
        members=tuple(event.members),
        lost=frozenset(),
        starting=tuple(worker for worker in view.starting if worker.worker not in names),
        waiting=None,
        num_generations=view.num_generations + 1,
        num_joins=view.num_joins + (event.cause == "join"),
    )


@_reduce.register
def _(event: kinds.WorkerStarting, view: RunView) -> RunView:
    return replace(view, starting=(*view.starting, event))


@_reduce.register
def _(event: kinds.WorkerLost, view: RunView) -> RunView:
    starting = tuple(worker for worker in view.starting if worker.worker != event.worker)
    return replace(view, lost=view.lost | {event.worker}, starting=starting, num_lost=view.num_lost + 1)


@_reduce.register
def _(event: kinds.WorkerDrained, view: RunView) -> RunView:
    return replace(view, starting=tuple(worker for worker in view.starting if worker.worker != event.worker))


@_reduce.register
def _(event: kinds.WaitingForWorkers, view: RunView) -> RunView:
    return replace(view, waiting=event)


@_reduce.register
def _(event: kinds.StepsDone, view: RunView) -> RunView:
    if not event.losses:
        return view
    steps = range(event.first_step, event.first_step + len(event.losses))
    points = [point for point in zip(steps, event.losses, strict=True) if point[0] % view.stride == 0]
    history, stride = _thinned((*view.history, *points), view.stride)
    recent = (*view.recent, *zip(steps, event.finished, event.rows, strict=True))[-HISTORY_POINTS:]
    new = tuple(done for done in recent if done[1] >= recent[-1][1] - SPEED_WINDOW_S)
    return replace(
        view,
        step=steps.stop,
        loss=event.losses[-1],
        learning_rate=event.learning_rates[-1],
        history=history,
        stride=stride,
        recent=new if len(new) > 1 else recent[-2:],
    )


def _thinned(history: tuple[tuple[int, float], ...], stride: int) -> tuple[tuple[tuple[int, float], ...], int]:
    while len(history) > HISTORY_POINTS:
        stride *= 2
        history = tuple(point for point in history if point[0] % stride == 0)
    return history, stride


@_reduce.register
def _(event: kinds.StepSkipped, view: RunView) -> RunView:
    return replace(view, num_skipped=view.num_skipped + 1)


@_reduce.register
def _(event: kinds.EvaluationDone, view: RunView) -> RunView:
    bests = (*view.bests, event)[-KEPT_EVALUATIONS:] if event.is_best else view.bests
    return replace(view, evaluations=(*view.evaluations, event)[-KEPT_EVALUATIONS:], bests=bests)


@_reduce.register
def _(event: kinds.CheckpointSaved, view: RunView) -> RunView:
    return replace(view, checkpoint=event)


@_reduce.register
def _(event: kinds.RunEnded, view: RunView) -> RunView:
    return replace(view, ended=event, recent=())
