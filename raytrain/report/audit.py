"""Did the run train on each row exactly once, in the planned step, whatever happened to its workers?

Rebuilds the plan from `run.json` and compares it with the row ids in the events. Also counts the rows of each epoch
without the plan, which detects an error in the plan itself. Only reads a run directory, in any process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytrain.errors import ConfigError
from raytrain.events import kinds
from raytrain.events.curve import StepRecord, curve
from raytrain.events.log import read
from raytrain.events.messages import count_of
from raytrain.events.row_ids import unpack
from raytrain.plan import Plan
from raytrain.report.outcome import invalid_metadata, read_metadata
from raytrain.rundir import RunDir

SHOWN_DIFFERENCES = 10

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit.

    Args:
        directory: the run's directory.
        steps: number of committed steps that were checked.
        epochs: number of complete epochs.
        rows: number of rows trained on, repeated rows included.
        dropped_rows_per_epoch: number of rows that `run.drop_last` leaves out of each epoch.
        generations, lost, joins, restores: number of generations, lost workers, joins, and starts from a checkpoint.
        num_differences: number of deviations from the plan; 0 is a proof.
        differences: messages of the first deviations.
    """

    directory: str
    steps: int
    epochs: int
    rows: int
    dropped_rows_per_epoch: int
    generations: int
    lost: int
    joins: int
    restores: int
    num_differences: int
    differences: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return self.num_differences == 0

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}

    def lines(self) -> list[str]:
        """The report as text."""
        verdict = "passed" if self.passed else f"FAILED with {count_of(self.num_differences, 'difference')}"
        dropped = f" ({count_of(self.dropped_rows_per_epoch, 'row')} dropped)" if self.dropped_rows_per_epoch else ""
        lines = [
            f"audit {verdict}: {self.directory}",
            f"  trained   {count_of(self.rows, 'row')} in {count_of(self.steps, 'step')}, "
            f"{count_of(self.epochs, 'whole epoch')}{dropped}",
            f"  through   {count_of(self.generations, 'generation')}: {count_of(self.lost, 'worker')} lost, "
            f"{count_of(self.joins, 'join')}, {count_of(self.restores, 'start')} from a checkpoint",
        ]
        if self.passed:
            return [*lines, "  proved    each step had its planned rows; each row once in each whole epoch"]
        more = self.num_differences - len(self.differences)
        return [*lines, *(f"  - {text}" for text in self.differences), *([f"  and {more} more"] if more else [])]


def audit(run_dir: RunDir) -> AuditReport:
    """Checks a run against its plan; O(rows of an epoch) memory.

    Raises:
        StorageError: there is no run, or its `run.json` is invalid.
        ConfigError: the run did not record its rows.
    """
    plan = _plan_of(run_dir)
    events = list(read(run_dir))
    steps = curve(events)
    if not any(record.row_ids for record in steps.values()):
        found = f"{count_of(len(steps), 'step')}, no row numbers" if steps else "no finished steps"
        raise ConfigError(run_dir.path, found, "the run recorded the rows of each step", "run with --run.audit")
    num_differences, shown = 0, []
    for text in _differences(plan, steps):
        num_differences += 1
        shown += [text] if num_differences <= SHOWN_DIFFERENCES else []
    return AuditReport(
        directory=run_dir.path,
        steps=len(steps),
        epochs=(max(steps) + 1) // plan.steps_per_epoch,
        rows=sum(record.rows for record in steps.values()),
        dropped_rows_per_epoch=plan.num_dropped_rows,
        **_history(events),
        num_differences=num_differences,
        differences=tuple(shown),
    )


def _plan_of(run_dir: RunDir) -> Plan:
    values = read_metadata(run_dir)["plan"]
    try:
        chunks = values["chunk_rows"]
        return Plan(
            num_rows=int(values["num_rows"]),
            chunk_rows=None if chunks is None else tuple(map(int, chunks)),
            global_batch=int(values["global_batch"]),
            num_logical=int(values["num_logical"]),
            seed=int(values["seed"]),
            shuffle_window=int(values["shuffle_window"]),
            drop_last=bool(values["drop_last"]),
        )
    except KeyError as error:
        raise invalid_metadata(run_dir, f"no {error.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise invalid_metadata(run_dir, str(error)) from None


def _differences(plan: Plan, steps: dict[int, StepRecord]) -> Iterator[str]:
    """All deviations from the plan, in the order of steps."""
    last = max(steps)
    for epoch in range(last // plan.steps_per_epoch + 1):
        trained = np.zeros(plan.num_rows, dtype=np.int64)
        first = epoch * plan.steps_per_epoch
        for step in range(first, min(first + plan.steps_per_epoch, last + 1)):
            record = steps.get(step)
            if record is None or record.row_ids is None:
                yield f"step {step}: " + ("is not recorded" if record is None else "its rows are not recorded")
                continue
            try:
                rows = unpack(record.row_ids)
            except ValueError as error:
                yield f"step {step}: its rows cannot be read: {error}"
                continue
            yield from _step_differences(step, rows, record, plan)
            inside = rows[(rows >= 0) & (rows < plan.num_rows)]
            trained += np.bincount(inside, minlength=plan.num_rows)
        whole = last + 1 >= first + plan.steps_per_epoch
        yield from _epoch_differences(epoch, trained, plan, whole)


def _step_differences(step: int, rows: Rows, record: StepRecord, plan: Plan) -> Iterator[str]:
    planned = np.concatenate([plan.row_ids(step, logical) for logical in range(plan.num_logical)])
    if record.rows != len(rows):
        yield f"step {step}: reported {count_of(record.rows, 'row')}, recorded the numbers of {len(rows)}"
    if np.array_equal(np.sort(rows), np.sort(planned)):
        return
    numbers, place = np.unique(np.concatenate([rows, planned]), return_inverse=True)
    excess = np.bincount(place[: len(rows)], minlength=len(numbers))
    excess -= np.bincount(place[len(rows) :], minlength=len(numbers))
    for row, times in zip(numbers[excess != 0].tolist(), excess[excess != 0].tolist(), strict=True):
        what = "not trained on, though planned" if times < 0 else "trained on, but not planned"
        often = f" ({abs(times)} times)" if abs(times) > 1 else ""
        yield f"step {step}, row {row}: {what}{often}"


def _epoch_differences(epoch: int, trained: Rows, plan: Plan, whole: bool) -> Iterator[str]:
    """Compares how often each row was trained on, shape [num_rows], with once; dropped rows are checked per step."""
    for row in np.flatnonzero(trained > 1).tolist():
        yield f"epoch {epoch + 1}, row {row}: trained on {trained[row]} times"
    unused = np.flatnonzero(trained == 0).tolist()
    if whole and len(unused) != plan.num_dropped_rows:
        some = ", ".join(map(str, unused[:3])) + (", ..." if len(unused) > 3 else "")
        rule = f"expected {plan.num_dropped_rows}"
        yield f"epoch {epoch + 1}: {count_of(len(unused), 'row')} not trained on, {rule} (row {some or 'none'})"


def _history(events: Iterable[kinds.Event]) -> dict[str, int]:
    events = list(events)
    formed = [event for event in events if isinstance(event, kinds.GenerationFormed)]
    return {
        "generations": len(formed),
        "lost": sum(isinstance(event, kinds.WorkerLost) for event in events),
        "joins": sum(event.cause == "join" for event in formed),
        "restores": sum(isinstance(event, kinds.StateRestored) and bool(event.checkpoint) for event in events),
    }
