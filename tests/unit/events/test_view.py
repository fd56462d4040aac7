"""What viewers show follows from the events, and stays small."""

from __future__ import annotations

import pytest

from raytrain.console.demo import demo_events
from raytrain.events import kinds
from raytrain.events.view import HISTORY_POINTS, KEPT_NOTES, RunView, fold, reduce


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
    return kinds.RunStarted(
        name="r",
        directory="/r",
        num_steps=num_steps,
        steps_per_epoch=10,
        rows_per_epoch=100,
        global_batch=10,
        num_logical=2,
        workers=(1, 2),
    )


def test_speed_and_time_left_are_those_of_the_last_seconds() -> None:
    view = fold([started(), steps(0, 20, seconds=5.0), steps(20, 50, seconds=5.0)])
    assert view.rows_per_s == pytest.approx(10 / 5.0)
    assert view.left_s == pytest.approx(50 * 5.0)
    assert (view.step, view.epoch, view.num_epochs) == (50, 6, 10)


def test_a_finished_run_is_in_its_last_epoch() -> None:
    view = fold([started(), steps(0, 100)])
    assert (view.epoch, view.left_s) == (10, 0.0)


def test_nothing_is_claimed_before_the_first_steps() -> None:
    view = fold([started()])
    assert (view.state, view.loss, view.rows_per_s, view.left_s) == ("starting", None, None, None)


def test_the_history_stays_bounded_and_covers_the_whole_run() -> None:
    view = fold(steps(first, first + 100) for first in range(0, 10_000, 100))
    numbers = [step for step, _ in view.history]
    assert HISTORY_POINTS / 2 <= len(numbers) <= HISTORY_POINTS
    assert numbers == list(range(0, 10_000, view.stride))


def test_a_restored_state_rewinds_all_that_came_after_it() -> None:
    saved = kinds.CheckpointSaved(step=20, checkpoint="b", size_bytes=1, seconds=0.1, stall_s=0.0)
    events = [
        *(started(), steps(0, 10), evaluated(10, 0.5, is_best=True)),
        *(steps(10, 20), evaluated(20, 0.4, is_best=True), saved),
        *(steps(20, 25), kinds.StateRestored(step=10, checkpoint="a")),
    ]
    view = fold(events)
    assert (view.step, view.loss, view.history[-1]) == (10, 9.0, (9, 9.0))
    assert view.best == view.evaluation == evaluated(10, 0.5, is_best=True)
    assert (view.checkpoint, view.rows_per_s) == (None, None)


def test_the_best_evaluation_may_be_an_older_one() -> None:
    view = fold([evaluated(1, 0.1, is_best=True), evaluated(2, 0.3, is_best=False)])
    assert view.best is not None
    assert view.evaluation is not None
    assert (view.best.step, view.evaluation.step) == (1, 2)


def test_members_are_lost_replaced_and_joined() -> None:
    events = demo_events()
    by_kind = {kind: next(i for i, e in enumerate(events) if e.kind == kind) for kind in ("worker_lost",)}
    during = fold(events[: by_kind["worker_lost"] + 1])
    assert (during.lost, len(during.members)) == ({"w1"}, 2)
    view = fold(events)
    assert [member.worker for member in view.members] == ["w0", "w2"]
    assert (view.lost, view.starting, view.num_lost, view.num_joins, view.num_generations) == (set(), (), 1, 1, 3)


def test_a_starting_worker_that_is_lost_is_not_starting_any_more() -> None:
    starting = kinds.WorkerStarting(worker="w9", node="n", pid=1)
    view = reduce(RunView(), starting)
    assert view.starting == (starting,)
    assert reduce(view, kinds.WorkerLost(worker="w9", node="n", pid=1, reason="gone")).starting == ()


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
