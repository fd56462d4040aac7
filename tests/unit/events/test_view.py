"""What viewers show follows from the events, and its size is bounded."""

from __future__ import annotations

import pytest

from raytrain.events import kinds
from raytrain.events.view import HISTORY_POINTS, KEPT_NOTES, RunView, fold, reduce
from tests.support.demo_run import demo_events


def steps(first: int, stop: int, seconds: float = 0.5) -> kinds.StepsDone:
    count = stop - first
    return kinds.StepsDone(
        first_step=first,
        losses=[float(step) for step in range(first, stop)],
        weights=[1.0] * count,
        rows=[10] * count,
        learning_rates=[0.1] * count,
        finished=[1000 + seconds * (step + 1) for step in range(first, stop)],
    )


def evaluated(step: int, loss: float, is_best: bool) -> kinds.EvaluationDone:
    return kinds.EvaluationDone(step=step, metrics={"valid/loss": loss}, rows=1, seconds=0.1, is_best=is_best)


def started(num_steps: int = 100) -> kinds.RunStarted:
    sizes = {"steps_per_epoch": 10, "rows_per_epoch": 100, "global_batch": 10, "num_logical": 2}
    return kinds.RunStarted(name="r", directory="/r", num_steps=num_steps, workers=(1, 2), **sizes)  # type: ignore[arg-type]


def test_throughput_and_remaining_time_are_those_of_the_last_seconds() -> None:
    view = fold([started()])
    assert (view.state, view.loss, view.rows_per_s, view.left_s) == ("starting", None, None, None)
    view = fold([started(), steps(0, 20, seconds=5.0), steps(20, 50, seconds=5.0)])
    assert view.rows_per_s == pytest.approx(10 / 5.0)
    assert view.left_s == pytest.approx(50 * 5.0)
    assert (view.step, view.epoch, view.num_epochs) == (50, 6, 10)
    view = fold([started(), steps(0, 100)])
    assert (view.epoch, view.left_s) == (10, 0.0)


def test_the_loss_history_is_bounded_and_covers_the_whole_run() -> None:
    view = fold(steps(first, first + 100) for first in range(0, 10_000, 100))
    numbers = [step for step, _ in view.history]
    assert HISTORY_POINTS / 2 <= len(numbers) <= HISTORY_POINTS
    assert numbers == list(range(0, 10_000, view.stride))


def test_a_restored_state_rewinds_everything_after_it() -> None:
    saved = kinds.CheckpointSaved(step=20, checkpoint="b", size_bytes=1, seconds=0.1, stall_s=0.0)
    events = [
        *(started(), steps(0, 10), evaluated(10, 0.5, is_best=True)),
        *(steps(10, 20), evaluated(20, 0.4, is_best=True), evaluated(22, 0.6, is_best=False), saved),
        *(steps(20, 25), kinds.StateRestored(step=10, checkpoint="a")),
    ]
    before = fold(events[:-1])
    assert (before.best, before.evaluation) == (evaluated(20, 0.4, True), evaluated(22, 0.6, False))
    view = fold(events)
    assert (view.step, view.loss, view.history[-1]) == (10, 9.0, (9, 9.0))
    assert view.best == view.evaluation == evaluated(10, 0.5, is_best=True)
    assert (view.checkpoint, view.rows_per_s) == (None, None)


def test_members_are_lost_replaced_and_joined() -> None:
    events = demo_events()
    first_loss = next(i for i, event in enumerate(events) if event.kind == "worker_lost")
    during = fold(events[: first_loss + 1])
    assert (during.lost, len(during.members)) == ({"w1"}, 2)
    view = fold(events)
    assert [member.worker for member in view.members] == ["w0", "w2"]
    assert (view.lost, view.starting, view.num_lost, view.num_joins, view.num_generations) == (set(), (), 1, 1, 3)


def test_a_lost_or_drained_worker_is_not_starting_any_more() -> None:
    starting = kinds.WorkerStarting(worker="w9", node="n", pid=1)
    view = reduce(RunView(), starting)
    assert view.starting == (starting,)
    for event in (
        kinds.WorkerLost(worker="w9", node="n", pid=1, reason="killed"),
        kinds.WorkerDrained(worker="w9", node="n", pid=1),
    ):
        assert reduce(view, event).starting == ()


def test_the_state_follows_waiting_training_and_the_end() -> None:
    events = demo_events()
    waiting = kinds.WaitingForWorkers(have=0, need=1, reason="all lost")
    view = fold(events)
    assert view.state == "training"
    assert reduce(view, waiting).state == "waiting for workers"
    ended = reduce(reduce(view, waiting), kinds.RunEnded(outcome="stopped", step=view.step))
    assert ended.state == "stopped"
    assert reduce(ended, started()).state == "starting"


def test_notes_stay_bounded() -> None:
    view = fold(kinds.StepSkipped(step=step, loss=float("nan")) for step in range(100))
    assert (len(view.notes), view.num_skipped) == (KEPT_NOTES, 100)
    assert view.notes[-1].text.startswith("step 99 skipped")
