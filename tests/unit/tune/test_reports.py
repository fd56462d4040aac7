"""Reports: one per evaluation, once its checkpoint is there, with axes that count over the whole life of a trial."""

from __future__ import annotations

from typing import Any

from raytrain.events import kinds
from raytrain.tune.reports import Replay, Report, Reports

PER_EPOCH = 10


def started() -> kinds.RunStarted:
    return kinds.RunStarted(
        name="trial",
        directory="",
        num_steps=40,
        steps_per_epoch=PER_EPOCH,
        rows_per_epoch=75,
        global_batch=8,
        num_logical=1,
        workers=(1, 1),
    )


def evaluated(step: int, value: float = 0.5, is_best: bool = False) -> kinds.EvaluationDone:
    return kinds.EvaluationDone(step=step, metrics={"valid/loss": value}, rows=5, seconds=0.1, is_best=is_best)


def saved(step: int) -> kinds.CheckpointSaved:
    return kinds.CheckpointSaved(step=step, checkpoint=f"step-{step}", size_bytes=1, seconds=0.1, stall_s=0.0)


def restored(step: int) -> kinds.StateRestored:
    return kinds.StateRestored(step=step, checkpoint=f"step-{step}" if step else "")


def steps(first: int, loss: float) -> kinds.StepsDone:
    one: dict[str, Any] = {"weights": [1.0], "rows": [8], "learning_rates": [0.1], "finished": [1.0]}
    return kinds.StepsDone(first_step=first, losses=[loss], **one)


def of(*events: kinds.Event) -> list[Report]:
    reports = Reports(is_saved_at=lambda step: step % PER_EPOCH == 0)
    return [report for event in (started(), *events) for report in reports.take(event)]


def test_a_report_waits_for_its_checkpoint_and_names_it() -> None:
    assert of(evaluated(10)) == []
    (report,) = of(steps(9, 1.5), evaluated(10), saved(10))
    assert (report.step, report.checkpoint) == (10, "step-10")
    assert report.metrics == {"train/loss": 1.5, "valid/loss": 0.5, "step": 10, "epoch": 1, "rows": 75}


def test_one_without_a_checkpoint_of_its_own_is_told_at_once_and_names_the_newest() -> None:
    reports = of(evaluated(10), saved(10), evaluated(14))
    assert [(report.step, report.checkpoint) for report in reports] == [(10, "step-10"), (14, "step-10")]
    assert (reports[1].metrics["epoch"], reports[1].metrics["rows"]) == (1.4, 75 + 4 * 8)


def test_the_rows_of_an_epoch_whose_last_step_is_short_are_those_that_there_are() -> None:
    assert of(evaluated(20), saved(20))[0].metrics["rows"] == 150


def test_the_best_one_so_far_is_saved_and_waited_for_too() -> None:
    assert of(evaluated(14, is_best=True)) == []
    assert [report.step for report in of(evaluated(14, is_best=True), saved(14))] == [14]


def test_no_report_is_held_for_ever() -> None:
    failed = kinds.CheckpointFailed(step=10, reason="full")
    assert [report.step for report in of(evaluated(10), failed)] == [10]
    assert [report.step for report in of(evaluated(10), evaluated(20))] == [10]
    ended = kinds.RunEnded(outcome="completed", step=5)
    assert [report.step for report in of(evaluated(10), ended)] == [10]


def test_a_checkpoint_of_an_earlier_step_is_not_the_one_that_is_waited_for() -> None:
    assert of(evaluated(20), saved(10)) == []
    assert of(evaluated(20), kinds.CheckpointFailed(step=10, reason="full")) == []


def test_an_evaluation_that_is_done_again_is_told_once_with_its_new_values() -> None:
    reports = of(evaluated(10, 0.5), restored(0), evaluated(10, 0.4), saved(10))
    assert [report.metrics["valid/loss"] for report in reports] == [0.4]


def test_after_a_restore_the_newest_checkpoint_is_the_one_that_was_restored() -> None:
    reports = of(evaluated(10), saved(10), evaluated(20), saved(20), restored(10), evaluated(14))
    assert reports[-1].checkpoint == "step-10"


def test_a_report_whose_checkpoint_is_there_but_was_not_told_of_comes_with_the_restore() -> None:
    """The evaluation is in the checkpoint, so it is not done again, and nothing else would tell of it."""
    reports = of(evaluated(10), restored(10), evaluated(20), saved(20))
    assert [(report.step, report.checkpoint) for report in reports] == [(10, "step-10"), (20, "step-20")]


def test_a_replay_leaves_out_what_was_lost_and_what_will_be_done_again() -> None:
    log = [
        *(started(), restored(0), evaluated(10, 0.1), saved(10), evaluated(20, 0.2)),
        *(started(), restored(10), evaluated(20, 0.3), saved(20), evaluated(30, 0.4)),
    ]
    reports = Replay(Reports(lambda step: True)).over(log, up_to=20)
    assert [(report.step, report.metrics["valid/loss"]) for report in reports] == [(10, 0.1), (20, 0.3)]


def test_a_killed_run_whose_last_checkpoint_was_not_told_of_loses_no_report() -> None:
    reports = Reports(lambda step: True)
    told = Replay(reports).over([started(), restored(0), evaluated(10, 0.1)], up_to=10)
    told += [report for event in (started(), restored(10)) for report in reports.take(event)]
    assert [(report.step, report.metrics["valid/loss"]) for report in told] == [(10, 0.1)]


def test_a_replay_of_nothing_is_nothing() -> None:
    assert Replay(Reports(lambda step: True)).over([], up_to=10) == []
