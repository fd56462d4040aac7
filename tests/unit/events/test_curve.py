"""The curve of a run holds the steps that count."""

from __future__ import annotations

from raytrain.events import kinds
from raytrain.events.curve import StepRecord, curve


def one_step(step: int, loss: float) -> kinds.StepsDone:
    return kinds.StepsDone(
        first_step=step,
        losses=[loss],
        weights=[2.0],
        rows=[3],
        learning_rates=[0.1],
        finished=[4.0],
        data_waits=[0.5],
        row_ids=["ids"],
    )


def test_steps_that_were_undone_are_replaced_by_those_of_the_new_attempt() -> None:
    restored = kinds.StateRestored(step=1, checkpoint="step-1")
    records = curve([one_step(0, 0.5), one_step(1, 0.4), one_step(2, 0.3), restored, one_step(1, 0.45)])
    assert records == {
        0: StepRecord(0, 0.5, 2.0, 3, 0.1, 4.0, 0.5, "ids"),
        1: StepRecord(1, 0.45, 2.0, 3, 0.1, 4.0, 0.5, "ids"),
    }


def test_a_log_that_does_not_know_waits_for_data_has_none() -> None:
    """As those of earlier versions."""
    old = kinds.StepsDone(
        first_step=0, losses=[0.5, 0.4], weights=[2.0] * 2, rows=[3] * 2, learning_rates=[0.1] * 2, finished=[4.0, 5.0]
    )
    assert [record.data_wait_s for record in curve([old]).values()] == [0.0, 0.0]
