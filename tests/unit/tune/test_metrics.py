"""Whether trials will report the sweep's metric is known before the first one, without building a model of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raytrain.config import RunConfig
from raytrain.errors import ConfigError
from raytrain.launch.work import schedule
from raytrain.task import Task
from raytrain.tune.metrics import check_metric
from tests.golden import check as golden
from tests.support.tasks import Regression


class Enormous(Regression):
    """A model that no machine has memory for."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 10**9), nn.Linear(10**9, 10**6), nn.Linear(10**6, 1))


class NeedsValues(Regression):
    """Its code cannot run without values."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"mae" if model(batch["x"]).sum().item() > 0 else "other": torch.zeros(1)}


class TrainsOnly(Regression):
    """Nothing is evaluated."""

    def data(self) -> dict[str, Any]:
        return {"train": super().data()["train"]}


def check(metric: str, task: Regression | None = None) -> None:
    task = task or Regression()
    check_metric(metric, task, schedule(task, RunConfig()))


@pytest.mark.parametrize("metric", ["valid/mae", "valid/loss"])
@pytest.mark.parametrize("task", [Regression(), Enormous()], ids=["small", "enormous"])
def test_the_loss_and_the_tasks_metrics_of_a_source_are_known(metric: str, task: Regression) -> None:
    check(metric, task)


@pytest.mark.parametrize("metric", ["valid/mape", "test/mae", "mae", "", "train/loss"])
def test_r15_what_no_trial_reports_is_refused_and_what_there_is_is_named(metric: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(metric)
    assert refused.value.rule == "is a metric that a trial reports: valid/loss, valid/mae"
    if metric == "valid/mape":
        golden("errors/tune_unknown_metric.txt", f"{refused.value}\n")


def test_where_the_names_cannot_be_known_the_first_evaluation_tells() -> None:
    check("valid/anything", NeedsValues())
    with pytest.raises(ConfigError):
        check("test/anything", NeedsValues())


def test_a_task_that_evaluates_nothing_cannot_be_searched() -> None:
    with pytest.raises(ConfigError) as refused:
        check("valid/loss", TrainsOnly())
    golden("errors/tune_nothing_evaluated.txt", f"{refused.value}\n")


class LossOnly(Regression):
    """Has no metrics of its own."""

    metrics = Task.metrics


class Transformed(Regression):
    """Its metrics need a column that only its transform makes."""

    def transform(self, columns: Any) -> Any:
        return {**columns, "twice": columns["y"] * 2}

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"twice": (model(batch["x"]) - batch["twice"]).abs().mean()}


class TwoSources(Regression):
    """Is evaluated on two sources."""

    def data(self) -> dict[str, Any]:
        return {**super().data(), "test": super().data()["valid"]}


def test_a_task_without_metrics_has_its_loss() -> None:
    check("valid/loss", LossOnly())
    with pytest.raises(ConfigError, match=r"is a metric that a trial reports: valid/loss\n"):
        check("valid/mae", LossOnly())


def test_rows_are_transformed_first_as_in_the_evaluation() -> None:
    check("valid/twice", Transformed())
    with pytest.raises(ConfigError, match="valid/loss, valid/twice"):
        check("valid/mae", Transformed())


def test_each_source_has_the_metrics() -> None:
    check("test/mae", TwoSources())
    with pytest.raises(ConfigError, match="valid/loss, valid/mae, test/loss, test/mae"):
        check("test/mape", TwoSources())


def test_finding_out_draws_nothing_from_the_programs_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    check("valid/mae")
    assert torch.equal(torch.get_rng_state(), before)
