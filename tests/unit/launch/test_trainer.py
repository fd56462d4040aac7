"""The run has a directory by default, and of the errors that Ray Train reports, the task's own is the cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.train import ControllerError, TrainingFailedError, WorkerGroupError

from raytrain.config import RunConfig
from raytrain.errors import DataError, InternalError, PoisonRowsError, RaytrainError, TaskError, WorkersLostError
from raytrain.launch.trainer import Trainer, cause_of, with_rows
from raytrain.plan import Plan
from tests.unit.launch.test_resume import Line

TASK = TaskError("Traceback (most recent call last):\nKeyError: 'x'\n", "loss at step 3 on rank 1")
DATA = DataError("batch", "no column 'y'", "is one of the columns x", "correct the name")
LOST = WorkersLostError("the group broke 9 times")


def of_workers(*failures: Exception) -> TrainingFailedError:
    return WorkerGroupError("workers failed", dict(enumerate(failures)))


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (of_workers(LOST, TASK), TASK),
        (of_workers(LOST, DATA), DATA),
        (of_workers(DATA, TASK), TASK),
        (of_workers(ValueError("odd"), LOST), LOST),
        (ControllerError(DATA), DATA),
    ],
)
def test_r16_the_error_of_the_tasks_code_is_the_cause(error: TrainingFailedError, cause: RaytrainError) -> None:
    assert cause_of(error) is cause


def test_an_unexpected_error_keeps_its_text_as_an_internal_error() -> None:
    error = cause_of(WorkerGroupError("Traceback: somewhere\nRuntimeError: odd", {0: RuntimeError("odd")}))
    assert isinstance(error, InternalError)
    assert "Traceback: somewhere\nRuntimeError: odd" in str(error)


def test_r16_poison_rows_are_named() -> None:
    plan = Plan(30, (10, 10, 10), seed=3, global_batch=6, num_logical=3)
    error = with_rows(PoisonRowsError(4, (0, 2), "segmentation fault"), plan)
    assert isinstance(error, PoisonRowsError)
    assert error.rows == tuple(int(row) for logical in (0, 2) for row in plan.row_ids(4, logical))
    assert (len(error.rows), error.step, error.logical, error.cause) == (4, 4, (0, 2), "segmentation fault")
    assert with_rows(LOST, plan) is LOST


class TwoWords(Line):
    pass


def test_r10_the_run_directory_follows_from_storage_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainers = [Trainer(TwoWords()), Trainer(TwoWords(), RunConfig(name="a", storage="mock:///bucket"))]
    monkeypatch.chdir("/")
    assert [trainer.run_dir.path for trainer in trainers] == [f"{tmp_path}/runs/two-words", "bucket/a"]
