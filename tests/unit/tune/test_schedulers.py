"""What decides in a sweep, by name or given, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest
from ray import tune
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
)
from ray.tune.search import BasicVariantGenerator
from ray.tune.search.optuna import OptunaSearch

from raytrain.config import RunConfig
from raytrain.errors import ConfigError
from raytrain.sweep_config import SweepConfig
from raytrain.tune.schedulers import Choice
from tests.golden import check

SPACE = {"lr": tune.uniform(0, 1)}


def choose(scheduler: Any = None, searcher: Any = None, space: Any = None, epochs: int = 30, **sweep: Any) -> Choice:
    config = RunConfig(epochs=epochs, steps=None)
    return Choice.of(scheduler, searcher, SweepConfig(**sweep), config, space or SPACE)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("asha", AsyncHyperBandScheduler),
        ("hyperband", HyperBandScheduler),
        ("median", MedianStoppingRule),
        ("fifo", FIFOScheduler),
    ],
)
def test_schedulers_have_names(name: str, kind: type) -> None:
    assert type(Choice.of(None, None, SweepConfig(scheduler=name), RunConfig(epochs=3), SPACE).scheduler) is kind


def test_time_is_in_epochs_or_in_steps_as_the_run_is_long() -> None:
    assert choose().scheduler._time_attr == "epoch"
    by_steps = Choice.of(None, None, SweepConfig(), RunConfig(steps=900, eval_every=50), SPACE).scheduler
    assert (by_steps._time_attr, by_steps._max_t) == ("step", 900)


def pbt(**changed: Any) -> PopulationBasedTraining:
    return PopulationBasedTraining(time_attr="epoch", hyperparam_mutations={"lr": [0.1], **changed})


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        ({"searcher": [OptunaSearch(), OptunaSearch()]}, "two_searchers"),
        ({"scheduler": pbt(), "search": "optuna"}, "optuna_with_pbt"),
        ({"search": "optuna", "space": {"lr": tune.grid_search([1])}}, "grid_with_optuna"),
        ({"scheduler": pbt(**{"run.global_batch": [8, 16]})}, "pbt_changes_rows"),
        ({"scheduler": AsyncHyperBandScheduler(metric="loss", mode="min")}, "scheduler_with_metric"),
        ({"scheduler": HyperBandScheduler(), "concurrent": 2}, "hyperband_concurrent"),
        ({"scheduler": HyperBandScheduler(), "workers": 4}, "hyperband_workers"),
        (
            {"searcher": OptunaSearch(space={"lr": tune.uniform(0, 1)}, metric="loss", mode="min")},
            "searcher_with_space",
        ),
    ],
)
def test_r15_what_does_not_go_together_is_refused_with_four_parts(arguments: Any, mistake: str) -> None:
    with pytest.raises(ConfigError) as refused:
        choose(**arguments)
    check(f"errors/tune_{mistake}.txt", f"{refused.value}\n")


def test_pb2_may_not_change_rows_either() -> None:
    bounded = FIFOScheduler()
    bounded._hyperparam_bounds = {"run.seed": [0, 9]}
    with pytest.raises(ConfigError, match=r"changes run\.seed"):
        choose(bounded)


def test_what_goes_together_is_not_refused() -> None:
    given = pbt()
    assert choose(given).scheduler is given
    assert type(choose(search="optuna").searcher) is OptunaSearch
    searcher = OptunaSearch()
    assert choose(searcher=searcher).searcher is searcher
    assert choose(space={"lr": tune.grid_search([1])}).searcher is None
    choose(concurrent=2, workers=4)


@pytest.mark.parametrize(
    ("settings", "grace", "length"),
    [
        ({"epochs": 1}, 1, 1),
        ({"epochs": 30}, 1, 30),
        ({"epochs": 270}, 10, 270),
        ({"steps": 900}, 33, 900),
        ({"steps": 900, "eval_every": 50}, 50, 900),
        ({"steps": 40, "eval_every": 50}, 40, 40),
    ],
)
def test_the_first_rung_is_not_before_the_first_evaluation(settings: Any, grace: int, length: int) -> None:
    scheduler = Choice.of(None, None, SweepConfig(), RunConfig(**settings), SPACE).scheduler
    assert (scheduler._brackets[0]._rungs[-1][0], scheduler._max_t) == (grace, length)


def test_a_searcher_that_learns_does_not_run_ahead_of_the_cluster_and_random_values_need_not_wait() -> None:
    sweep = SweepConfig(seed=3)
    searcher, limit = choose(search="optuna").search(sweep, None, 4)
    assert (type(searcher), limit) == (OptunaSearch, 4)
    assert choose(search="optuna").search(SweepConfig(concurrent=2), 3, 4)[1] == 2
    searcher, limit = choose().search(sweep, None, 4)
    assert (type(searcher), limit, searcher.max_concurrent) == (BasicVariantGenerator, None, 0)
    assert choose().search(sweep, 3, 4)[0].max_concurrent == 3
