"""The curve of a run contains the committed steps."""

from __future__ import annotations

from raytrain.events import kinds
from raytrain.events.curve import StepRecord, curve


def one_step(step: int, loss: float, waits: list[float]) -> kinds.StepsDone:
    return kinds.StepsDone(
        first_step=step,
        losses=[loss],
        weights=[2.0],
        rows=[3],
        learning_rates=[0.1],  # type: ignore[arg-type]
        finished=[4.0],
        data_waits=waits,
        row_ids=["ids"],  # type: ignore[arg-type]
    )


def test_undone_steps_are_replaced_and_missing_data_waits_are_zero() -> None:
    restored = kinds.StateRestored(step=1, checkpoint="step-1")
    first = [one_step(step, 0.5 - step / 10, [0.5]) for step in range(3)]
    assert curve([*first, restored, one_step(1, 0.45, [])]) == {
        0: StepRecord(0, 0.5, 2.0, 3, 0.1, 4.0, 0.5, "ids"),
        1: StepRecord(1, 0.45, 2.0, 3, 0.1, 4.0, 0.0, "ids"),
    }
