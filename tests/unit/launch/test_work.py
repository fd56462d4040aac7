"""From a task and its settings to sources, plans and a number of steps; never to nothing."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain.config import RunConfig
from raytrain.errors import ConfigError, DataError, TaskError
from raytrain.launch.work import check_hooks, plan_facts, schedule
from raytrain.plan.order import Plan
from raytrain.task import Task
from tests.unit.launch.test_resume import Line


class NoTrain(Line):
    def data(self) -> dict[str, Any]:
        return {}


class Raises(Line):
    def data(self) -> dict[str, Any]:
        raise OSError("no such bucket")


@pytest.mark.parametrize(
    ("settings", "num_steps"),
    [({}, 2), ({"epochs": 3}, 6), ({"steps": 5}, 5), ({"global_batch": 3}, 3), ({"global_batch": 3, "drop_last": True}, 2)],
)
def test_steps_follow_from_rows_batch_and_length(settings: dict[str, Any], num_steps: int) -> None:
    assert schedule(Line(), RunConfig(**{"global_batch": 4, **settings})).num_steps == num_steps


def test_r11_fewer_rows_than_logical_workers_make_a_step() -> None:
    work = schedule(Line(num_rows=3), RunConfig(workers=2, logical_workers=4))
    assert work.num_steps == 1
    assert work.train.rows_in_step(0) == 3


def test_r11_settings_that_leave_no_step_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most the 8 rows"):
        schedule(Line(), RunConfig(global_batch=9, drop_last=True))


def test_training_data_are_required() -> None:
    with pytest.raises(DataError, match='has a source named "train"'):
        schedule(NoTrain(), RunConfig())


def test_r16_an_error_of_data_is_the_users(tmp_path: Any) -> None:
    with pytest.raises(TaskError, match="OSError: no such bucket"):
        schedule(Raises(), RunConfig())


def test_a_task_without_hooks_is_told_all_that_it_lacks() -> None:
    with pytest.raises(ConfigError, match="has no data, no model, no optimizer, no loss"):
        check_hooks(Task())


def test_the_facts_of_a_plan_make_the_plan_again() -> None:
    plan = schedule(Line(), RunConfig(global_batch=3, workers=2, seed=7)).train
    again = Plan(**plan_facts(plan))
    assert [again.rows(step, 1).tolist() for step in range(6)] == [plan.rows(step, 1).tolist() for step in range(6)]
