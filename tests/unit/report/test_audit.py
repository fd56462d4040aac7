"""The audit passes for runs that kept the plan, and names the row and step of each deviation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain.errors import ConfigError, StorageError
from raytrain.events import kinds
from raytrain.events.log import EventLog
from raytrain.events.rows import pack
from raytrain.plan.order import Plan
from raytrain.report.audit import audit
from raytrain.rundir import RunDir
from tests.golden import check

PLAN = Plan(num_rows=22, chunk_rows=(9, 0, 13), global_batch=5, num_logical=3, seed=7, shuffle_window=2)


def rows_of(plan: Plan, step: int) -> list[int]:
    return np.concatenate([plan.rows(step, logical) for logical in range(plan.num_logical)]).tolist()


def done(step: int, rows: Iterable[int] | None) -> kinds.StepsDone:
    ids = None if rows is None else np.array(list(rows), dtype=np.int64)
    return kinds.StepsDone(
        time=1.0,
        first_step=step,
        losses=[0.5],
        weights=[1.0],
        rows=[5 if ids is None else len(ids)],
        learning_rates=[0.1],
        finished=[1.0],
        row_ids=None if ids is None else [pack(ids)],
    )


def planned(plan: Plan, first: int, stop: int) -> list[kinds.Event]:
    return [done(step, rows_of(plan, step)) for step in range(first, stop)]


def write(run_dir: RunDir, plan: Plan, events: Iterable[kinds.Event]) -> None:
    values = {key: value for key, value in asdict(plan).items() if key != "shuffle"}
    run_dir.write_json({"plan": values}, "run.json")
    EventLog(run_dir).append(events)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.at(str(tmp_path), "run")


def survived(step: int) -> list[kinds.Event]:
    member = kinds.Member(worker="w", rank=0, node="n", pid=1, logical=[0, 1, 2])
    formed = kinds.GenerationFormed(time=1.0, generation=2, step=step, members=[member], pause_s=0.1, cause="join")
    return [kinds.WorkerLost(time=1.0, worker="v", node="n", pid=2, reason="killed"), formed]


def test_r1_a_run_that_kept_its_plan_through_a_loss_and_a_restore_passes(run_dir: RunDir) -> None:
    restored = kinds.StateRestored(time=1.0, step=6, checkpoint="step-6")
    write(run_dir, PLAN, [*planned(PLAN, 0, 7), *survived(7), *planned(PLAN, 7, 9), restored, *planned(PLAN, 6, 12)])
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
    assert report.differences == ()
    assert report.epochs == steps // plan.steps_per_epoch


def swap_between_steps(events: list[kinds.Event]) -> list[kinds.Event]:
    one, two = rows_of(PLAN, 1), rows_of(PLAN, 2)
    one[0], two[0] = two[0], one[0]
    return [events[0], done(1, one), done(2, two), *events[3:]]


def train_one_row_twice(events: list[kinds.Event]) -> list[kinds.Event]:
    return [*events[:2], done(2, [*rows_of(PLAN, 2), rows_of(PLAN, 0)[0]]), *events[3:]]


def forget_a_row(events: list[kinds.Event]) -> list[kinds.Event]:
    return [*events[:3], done(3, rows_of(PLAN, 3)[1:]), *events[4:]]


def lose_a_step(events: list[kinds.Event]) -> list[kinds.Event]:
    return [*events[:2], *events[3:]]


def report_a_wrong_count(events: list[kinds.Event]) -> list[kinds.Event]:
    first = events[0]
    return [replace(first, rows=[7]), *events[1:]] if isinstance(first, kinds.StepsDone) else []


def invent_a_row(events: list[kinds.Event]) -> list[kinds.Event]:
    return [done(0, [*rows_of(PLAN, 0)[1:], 999]), *events[1:]]


def garble_the_rows(events: list[kinds.Event]) -> list[kinds.Event]:
    last = events[4]
    return [*events[:4], replace(last, row_ids=["9.0.64.0"])] if isinstance(last, kinds.StepsDone) else []


def stop_recording(events: list[kinds.Event]) -> list[kinds.Event]:
    return [*events[:4], done(4, None)]


FIRST, SECOND, THIRD = (rows_of(PLAN, step)[0] for step in (0, 1, 2))


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (swap_between_steps, f"step 1, row {SECOND}: not trained on, though planned"),
        (swap_between_steps, f"step 2, row {SECOND}: trained on, but not planned"),
        (train_one_row_twice, f"step 2, row {FIRST}: trained on, but not planned"),
        (train_one_row_twice, f"epoch 1, row {FIRST}: trained on 2 times"),
        (forget_a_row, f"step 3, row {rows_of(PLAN, 3)[0]}: not trained on, though planned"),
        (forget_a_row, f"epoch 1: 1 row not trained on, 0 would be right (row {rows_of(PLAN, 3)[0]})"),
        (lose_a_step, "step 2: is not recorded"),
        (report_a_wrong_count, "step 0: reported 7 rows, recorded the numbers of 5"),
        (invent_a_row, "step 0, row 999: trained on, but not planned"),
        (garble_the_rows, "step 4: its rows cannot be read: packed rows are cut off: 0 bytes for 9 rows of 64 bits"),
        (stop_recording, "step 4: its rows are not recorded"),
    ],
)
def test_r1_each_deviation_is_found_and_named(run_dir: RunDir, harm: Callable[[Any], Any], found: str) -> None:
    write(run_dir, PLAN, harm(planned(PLAN, 0, 5)))
    report = audit(run_dir)
    assert not report.passed
    assert found in report.differences


def test_r13_a_run_with_another_seed_fails_and_only_the_first_differences_are_told(run_dir: RunDir) -> None:
    write(run_dir, PLAN, planned(replace(PLAN, seed=8), 0, 5))
    report = audit(run_dir)
    assert (report.passed, len(report.differences)) == (False, 10)
    check("audit_failed.txt", "\n".join(report.lines()).replace(run_dir.path, "/runs/digits") + "\n")


def test_a_run_without_recorded_rows_says_how_to_record_them(run_dir: RunDir) -> None:
    write(run_dir, PLAN, [done(0, None)])
    with pytest.raises(ConfigError, match=r"--run\.audit"):
        audit(run_dir)


def test_a_run_without_steps_is_not_passed(run_dir: RunDir) -> None:
    write(run_dir, PLAN, [])
    with pytest.raises(ConfigError, match="no finished steps"):
        audit(run_dir)


def test_a_missing_run_is_named(run_dir: RunDir) -> None:
    with pytest.raises(StorageError, match=r"no run\.json") as caught:
        audit(run_dir)
    assert caught.value.where == run_dir.path


@pytest.mark.parametrize(
    ("content", "found"),
    [("{", "not JSON"), ("{}", "no plan"), ('{"plan": {}}', "no chunk_rows"), ("[]", "no plan"), ("7", "no plan")],
)
def test_a_run_file_without_a_plan_is_refused(run_dir: RunDir, content: str, found: str) -> None:
    Path(run_dir.path).mkdir()
    Path(run_dir.child("run.json")).write_text(content)
    with pytest.raises(StorageError, match=found):
        audit(run_dir)
