"""The audit passes for runs that kept the plan, and names the row and step of each deviation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain.errors import ConfigError, StorageError
from raytrain.events import kinds
from raytrain.events.log import EventLog
from raytrain.events.row_ids import pack
from raytrain.plan import Plan
from raytrain.report.audit import audit
from raytrain.rundir import RunDir
from tests.golden import check

PLAN = Plan(num_rows=22, chunk_rows=(9, 0, 13), global_batch=5, num_logical=3, seed=7, shuffle_window=2)


def rows_of(plan: Plan, step: int) -> list[int]:
    return np.concatenate([plan.row_ids(step, logical) for logical in range(plan.num_logical)]).tolist()


def done(step: int, rows: list[int] | None, num_rows: int | None = None) -> kinds.StepsDone:
    ids = None if rows is None else [pack(np.array(rows, dtype=np.int64))]
    ones = {name: [1.0] for name in ("losses", "weights", "learning_rates", "finished")}
    return kinds.StepsDone(time=1.0, first_step=step, rows=[num_rows or len(rows or [])], row_ids=ids, **ones)  # type: ignore[arg-type]


def planned(plan: Plan, first: int, stop: int) -> list[kinds.Event]:
    return [done(step, rows_of(plan, step)) for step in range(first, stop)]


def write(run_dir: RunDir, plan: Plan, events: Iterable[kinds.Event]) -> None:
    run_dir.write_json({"plan": {key: value for key, value in asdict(plan).items() if key != "shuffle"}}, "run.json")
    EventLog(run_dir).append(events)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.at(str(tmp_path), "run")


def test_r1_a_run_that_kept_its_plan_through_a_loss_and_a_restore_passes(run_dir: RunDir) -> None:
    member = kinds.Member(worker="w", rank=0, node="n", pid=1, logical=[0, 1, 2])
    loss = kinds.WorkerLost(time=1.0, worker="v", node="n", pid=2, reason="killed")
    formed = kinds.GenerationFormed(time=1.0, generation=2, step=7, members=[member], pause_s=0.1, cause="join")
    restored = kinds.StateRestored(time=1.0, step=6, checkpoint="step-6")
    write(run_dir, PLAN, [*planned(PLAN, 0, 7), loss, formed, *planned(PLAN, 7, 9), restored, *planned(PLAN, 6, 12)])
    report = audit(run_dir)
    assert report.passed
    assert (report.steps, report.epochs, report.rows) == (12, 2, 54)
    assert (report.generations, report.lost, report.joins, report.restores) == (1, 1, 1, 1)
    check("audit_passed.txt", "\n".join(report.lines()).replace(run_dir.path, "/runs/digits") + "\n")
    assert json.loads(json.dumps(report.to_json()))["passed"] is True


@settings(max_examples=30, deadline=None)
@given(
    chunks=st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) >= 12),
    batch=st.integers(3, 12),
    logical=st.integers(1, 3),
    drop=st.booleans(),
    steps=st.integers(1, 12),
)
def test_r1_any_run_that_kept_its_plan_passes(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[int] | None, *, batch: int, logical: int, drop: bool, steps: int
) -> None:
    run_dir = RunDir.at(str(tmp_path_factory.mktemp("audit")), "run")
    num_rows = 23 if chunks is None else sum(chunks)
    plan = Plan(num_rows, chunks and tuple(chunks), batch, logical, seed=3, drop_last=drop)
    write(run_dir, plan, planned(plan, 0, steps))
    report = audit(run_dir)
    assert (report.differences, report.epochs) == ((), steps // plan.steps_per_epoch)


ROWS = [rows_of(PLAN, step) for step in range(5)]
(FIRST, SECOND, THIRD, FOURTH), GARBLED = (rows[0] for rows in ROWS[:4]), replace(done(4, ROWS[4]), row_ids=["9.0.64.0"])
SWAPPED = [done(1, [THIRD, *ROWS[1][1:]]), done(2, [SECOND, *ROWS[2][1:]])]


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (SWAPPED, f"step 1, row {SECOND}: not trained on, though planned"),
        (SWAPPED, f"step 2, row {SECOND}: trained on, but not planned"),
        ([done(2, [*ROWS[2], FIRST])], f"step 2, row {FIRST}: trained on, but not planned"),
        ([done(2, [*ROWS[2], FIRST])], f"epoch 1, row {FIRST}: trained on 2 times"),
        ([done(3, ROWS[3][1:])], f"step 3, row {FOURTH}: not trained on, though planned"),
        ([done(3, ROWS[3][1:])], f"epoch 1: 1 row not trained on, expected 0 (row {FOURTH})"),
        ([None, None, None], "step 2: is not recorded"),
        ([done(0, ROWS[0], num_rows=7)], "step 0: reported 7 rows, recorded the numbers of 5"),
        ([done(0, [*ROWS[0][1:], 999])], "step 0, row 999: trained on, but not planned"),
        ([GARBLED], "step 4: its rows cannot be read: packed row ids are truncated: 0 bytes for 9 rows of 64 bits"),
        ([done(4, None)], "step 4: its rows are not recorded"),
    ],
)
def test_r1_each_deviation_is_found_and_named(run_dir: RunDir, changed: list[kinds.StepsDone | None], found: str) -> None:
    events = {step: done(step, rows) for step, rows in enumerate(ROWS)} | {one.first_step: one for one in changed if one}
    write(run_dir, PLAN, [event for step, event in events.items() if changed[0] or step != 2])
    report = audit(run_dir)
    assert not report.passed
    assert found in report.differences


def test_r13_a_run_with_another_seed_fails_and_only_the_first_differences_are_shown(run_dir: RunDir) -> None:
    write(run_dir, PLAN, planned(replace(PLAN, seed=8), 0, 5))
    report = audit(run_dir)
    assert (report.passed, len(report.differences)) == (False, 10)
    check("audit_failed.txt", "\n".join(report.lines()).replace(run_dir.path, "/runs/digits") + "\n")


@pytest.mark.parametrize(("events", "found"), [([done(0, None)], "1 step, no row numbers"), ([], "no finished steps")])
def test_a_run_without_recorded_rows_is_not_passed(run_dir: RunDir, events: list[kinds.Event], found: str) -> None:
    write(run_dir, PLAN, events)
    with pytest.raises(ConfigError, match=r"--run\.audit") as caught:
        audit(run_dir)
    assert caught.value.value == found


def test_a_plan_with_a_missing_field_is_refused(run_dir: RunDir) -> None:
    run_dir.write_json({"plan": {}}, "run.json")
    with pytest.raises(StorageError, match="no chunk_rows"):
        audit(run_dir)
