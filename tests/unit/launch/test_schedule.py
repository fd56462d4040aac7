"""Sources, plans and the number of steps follow from a task and its settings."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from raytrain.config import RunConfig
from raytrain.errors import ConfigError, DataError, TaskError
from raytrain.launch.schedule import build_schedule, check_hooks, plan_to_json
from raytrain.plan import Plan
from raytrain.task import Task
from tests.unit.launch.test_resume import Line


class NoTrain(Line):
    def data(self) -> dict[str, Any]:
        return {}


class Bare(Line):
    """Returns no mapping of names to sources."""

    def data(self) -> Any:
        return [1, 2], [3, 4]


class Columns(Line):
    def data(self) -> Any:
        return {"train": {"x": [1.0, 2.0, 3.0], "y": [1.0, 2.0, 3.0]}, "valid": ([1], [2])}


class OpenFile(Line):
    """A dataset that keeps a file open, beside a function that is pickled by value."""

    def data(self) -> Any:
        rows = TensorDataset(torch.zeros(3))
        rows.decode = lambda row: row
        train = Subset(rows, range(3))
        train.file = open(os.devnull, "rb")  # noqa: SIM115
        return {"train": train}


class Raises(Line):
    def data(self) -> dict[str, Any]:
        raise OSError("no such bucket")


@pytest.mark.parametrize(
    ("settings", "num_steps"),
    [
        ({"global_batch": 4}, 2),
        ({"global_batch": 4, "epochs": 3}, 6),
        ({"steps": 5}, 5),
        ({"global_batch": 3}, 3),
        ({"global_batch": 3, "drop_last": True}, 2),
        ({"workers": 2, "logical_workers": 16}, 1),
    ],
)
def test_r11_steps_follow_from_rows_batch_and_length(settings: dict[str, Any], num_steps: int) -> None:
    schedule = build_schedule(Line(), RunConfig(**settings))
    assert schedule.num_steps == num_steps
    again = Plan(**plan_to_json(schedule.train))
    assert [again.row_ids(0, 0).tolist()] == [schedule.train.row_ids(0, 0).tolist()]


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        (Line(), ConfigError, "at most the 8 rows"),
        (NoTrain(), DataError, 'has a source named "train"'),
        (Bare(), DataError, r'Bare.data\n.*tuple\n.*\n.*return {"train": ...}'),
        (Columns(), DataError, r"Columns.data, source 'valid'\n.*tuple\n.*\n.*raytrain.arrays\(x=..., y=...\)"),
        (OpenFile(), DataError, r"OpenFile.data, source 'train'\n.*cannot pickle .*BufferedReader.*\n.*\n.*__getitem__"),
        (Raises(), TaskError, "OSError: no such bucket"),
    ],
)
def test_r11_data_without_a_step_or_a_training_source_is_refused(task: Task, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_schedule(task, RunConfig(global_batch=9, drop_last=True))


def test_all_missing_hooks_are_named() -> None:
    with pytest.raises(ConfigError, match="has no data, no model, no optimizer, no loss"):
        check_hooks(Task())
