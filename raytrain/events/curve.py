"""Which steps make up the result of a run? The complete curve, one record per committed step.

Steps that a restored older checkpoint undid are left out. A pure function of the events, for the audit, tests and
users, in any process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raytrain.events.kinds import Event, StateRestored, StepsDone


@dataclass(frozen=True)
class StepRecord:
    """One committed step.

    Args:
        step: counts from 0.
        loss: global loss, per unit of weight.
        weight: total weight of the global batch, in rows or tokens.
        rows: number of rows of the global batch.
        learning_rate: learning rate of this step.
        finished: Unix time in seconds.
        data_wait_s: seconds for which the leader waited for data.
        row_ids: the rows that were trained on, packed by `events.row_ids.pack`; None without audit.
    """

    step: int
    loss: float
    weight: float
    rows: int
    learning_rate: float
    finished: float
    data_wait_s: float = 0.0
    row_ids: str | None = None


def curve(events: Iterable[Event]) -> dict[int, StepRecord]:
    """The committed steps by number, in the order of training; O(steps) memory."""
    records: dict[int, StepRecord] = {}
    for event in events:
        if isinstance(event, StateRestored):
            for step in [step for step in records if step >= event.step]:
                del records[step]
        elif isinstance(event, StepsDone):
            records.update((record.step, record) for record in _records(event))
    return records


def _records(event: StepsDone) -> Iterable[StepRecord]:
    ids = event.row_ids if event.row_ids is not None else [None] * len(event.losses)
    waits = event.data_waits or [0.0] * len(event.losses)
    columns = zip(event.losses, event.weights, event.rows, event.learning_rates, event.finished, waits, ids, strict=True)
    return (StepRecord(event.first_step + i, *values) for i, values in enumerate(columns))
