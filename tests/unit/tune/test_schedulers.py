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
    ("arguments", "where", "value"),
    [
        ({"searcher": [OptunaSearch(), OptunaSearch()]}, "sweep.search", "2 searchers"),
        ({"scheduler": pbt(), "search": "optuna"}, "sweep.search", "optuna, with PopulationBasedTraining"),
        ({"search": "optuna", "space": {"lr": tune.grid_search([1])}}, "sweep.space.lr", "a grid, with optuna"),
        ({"scheduler": pbt(**{"run.global_batch": [8, 16]})}, "sweep.scheduler", "changes run.global_batch"),
        ({"scheduler": AsyncHyperBandScheduler(metric="loss", mode="min")}, "sweep.scheduler", "has the metric loss"),
        ({"scheduler": HyperBandScheduler(), "concurrent": 2}, "sweep.concurrent", "2"),
        ({"scheduler": HyperBandScheduler(), "workers": 4}, "sweep.workers", "(4, 4)"),
        (
            {"searcher": OptunaSearch(space={"lr": tune.uniform(0, 1)}, metric="loss", mode="min")},
            "sweep.search",
            "OptunaSearch with a space of its own",
        ),
    ],
)
def test_r15_what_does_not_go_together_is_refused_with_four_parts(arguments: Any, where: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        choose(**arguments)
    assert (refused.value.where, refused.value.value) == (where, value)
    assert refused.value.rule
    assert refused.value.fix


def test_a_searcher_that_learns_does_not_run_ahead_of_the_cluster_and_random_values_need_not_wait() -> None:
    sweep = SweepConfig(seed=3)
    searcher, limit = choose(search="optuna").search(sweep, None, 4)
    assert (type(searcher), limit) == (OptunaSearch, 4)
    assert choose(search="optuna").search(SweepConfig(concurrent=2), 3, 4)[1] == 2
    searcher, limit = choose().search(sweep, None, 4)
    assert (type(searcher), limit, searcher.max_concurrent) == (BasicVariantGenerator, None, 0)
    assert choose().search(sweep, 3, 4)[0].max_concurrent == 3
