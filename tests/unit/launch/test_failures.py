"""Of what Ray Train reports, the user's own error comes first."""

from __future__ import annotations

import pytest
from ray.train import ControllerError, WorkerGroupError

from raytrain.errors import (
    DataError,
    DeadlyRowsError,
    InternalError,
    RaytrainError,
    ResourceError,
    TaskError,
    WorkersLostError,
)
from raytrain.launch.failures import own_error, with_rows
from raytrain.plan.order import Plan

TASK = TaskError("Traceback (most recent call last):\nKeyError: 'x'\n", "loss at step 3 on rank 1")
DATA = DataError("batch", "no column 'y'", "is one of the columns x", "correct the name")
LOST = WorkersLostError("the group broke 9 times")


@pytest.mark.parametrize(
    ("failures", "cause"),
    [([LOST, TASK], TASK), ([LOST, DATA], DATA), ([DATA, TASK], TASK), ([LOST], LOST), ([ValueError("odd"), LOST], LOST)],
)
def test_r16_the_error_of_the_users_code_is_the_cause_whoever_else_failed(
    failures: list[Exception], cause: RaytrainError
) -> None:
    assert own_error(WorkerGroupError("workers failed", dict(enumerate(failures)))) is cause


def test_an_error_of_the_controller_that_is_ours_is_the_cause() -> None:
    cause = ResourceError("run.workers", "at least 4 workers", "asked for 4 CPU, the cluster has 2", "lower it")
    assert own_error(ControllerError(cause)) is cause


def test_what_nobody_expected_keeps_its_whole_text_and_is_ours_to_mend() -> None:
    error = own_error(WorkerGroupError("Traceback: somewhere\nRuntimeError: odd", {0: RuntimeError("odd")}))
    assert isinstance(error, InternalError)
    assert "Traceback: somewhere\nRuntimeError: odd" in str(error)


def test_r16_the_rows_that_killed_their_workers_are_named() -> None:
    plan = Plan(30, (10, 10, 10), seed=3, global_batch=6, num_logical=3)
    blamed = DeadlyRowsError(4, (0, 2), "segmentation fault")
    error = with_rows(blamed, plan)
    assert isinstance(error, DeadlyRowsError)
    assert error.rows == tuple(int(row) for logical in (0, 2) for row in plan.rows(4, logical))
    assert len(error.rows) == 4
    assert (error.step, error.logical, error.cause) == (4, (0, 2), "segmentation fault")
    assert with_rows(LOST, plan) is LOST
