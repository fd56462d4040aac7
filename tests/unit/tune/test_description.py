"""What a sweep is, and whether the one that is there is the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import tune

from raytrain.config import RunConfig
from raytrain.errors import ConfigError, ResumeError
from raytrain.launch.work import schedule
from raytrain.rundir import RunDir
from raytrain.sweep_config import SweepConfig
from raytrain.tune import description
from raytrain.tune.recipe import recipe
from raytrain.tune.schedulers import Choice
from tests.golden import check
from tests.support.tasks import Regression

SPACE = {"lr": tune.loguniform(0.01, 0.1), "run.global_batch": tune.choice([8, 16])}


def facts(space: Any = None, **more: Any) -> dict[str, Any]:
    config, sweep = RunConfig(**{"epochs": 2, **more}), SweepConfig(trials=4)
    made = recipe(Regression, config)
    choice = Choice.of(None, None, sweep, config, space or SPACE)
    return description.facts(made, sweep, space or SPACE, choice, schedule(Regression(), config))


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (lambda: facts(epochs=3), "run.epochs: 2 -> 3"),
        (lambda: facts({**SPACE, "lr": tune.uniform(0.01, 0.1)}), "space.lr: "),
        (lambda: facts({"lr": SPACE["lr"]}), "space.run.global_batch: "),
    ],
)
def test_r10_a_sweep_goes_on_as_it_was_begun_or_not_at_all(tmp_path: Path, other: Any, line: str) -> None:
    directory = RunDir.at(str(tmp_path), "sweep")
    description.check_same(directory, facts(), facts(max_failures=3))
    description.check_same(directory, None, facts())
    with pytest.raises(ResumeError, match=line) as refused:
        description.check_same(directory, facts(), other())
    assert refused.value.fix == "set them back, or choose another run.name"


DOMAINS: dict[str, Callable[[], Any]] = {
    "uniform": lambda: tune.uniform(0, 1),
    "loguniform": lambda: tune.loguniform(0.1, 1),
    "quniform": lambda: tune.quniform(0, 1, 0.5),
    "qloguniform": lambda: tune.qloguniform(0.1, 1, 0.1),
    "randn": lambda: tune.randn(0, 1),
    "qrandn": lambda: tune.qrandn(0, 1, 0.1),
    "randint": lambda: tune.randint(1, 3),
    "qrandint": lambda: tune.qrandint(1, 9, 2),
    "lograndint": lambda: tune.lograndint(1, 9),
    "qlograndint": lambda: tune.qlograndint(1, 9, 2),
    "choice": lambda: tune.choice([1, "a"]),
    "grid": lambda: tune.grid_search([5, 6]),
    "function": lambda: tune.sample_from(lambda: 0.5),
    "function of the others": lambda: tune.sample_from(lambda config: config["lr"] * 2),
    "constant": lambda: "constant",
}


@pytest.mark.parametrize("kind", DOMAINS)
def test_r10_the_same_space_is_the_same_when_the_command_is_started_again(kind: str) -> None:
    """Each start makes its domains anew: what says where they lie in memory would differ."""
    text = facts({"lr": DOMAINS[kind]()})["space"]["lr"]
    assert " at 0x" not in text
    assert text == facts({"lr": DOMAINS[kind]()})["space"]["lr"]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (tune.uniform(0, 1), tune.uniform(0, 2)),
        (tune.uniform(0.1, 1), tune.loguniform(0.1, 1)),
        (tune.quniform(0, 1, 0.1), tune.quniform(0, 1, 0.5)),
        (tune.quniform(0.1, 1, 0.1), tune.qloguniform(0.1, 1, 0.1)),
        (tune.randn(0, 1), tune.randn(5, 2)),
        (tune.randint(1, 3), tune.randint(1, 4)),
        (tune.choice([1, 2]), tune.choice([2, 1])),
        (tune.choice([1, 2]), tune.grid_search([1, 2])),
        (1, "1.5"),
    ],
    ids=["end", "scale", "step", "scale in steps", "normal", "whole numbers", "order", "grid", "constant"],
)
def test_r10_domains_that_differ_are_not_the_same(before: Any, now: Any) -> None:
    texts = [re.sub(" at 0x[0-9a-f]+", "", facts({"lr": domain})["space"]["lr"]) for domain in (before, now)]
    assert texts[0] != texts[1]


def test_r10_all_that_differs_is_told_at_once(tmp_path: Path) -> None:
    directory = RunDir.at(str(tmp_path), "sweep")
    before = facts({"lr": tune.uniform(0.1, 1), "run.seed": tune.choice([1, 2])})
    with pytest.raises(ResumeError) as refused:
        description.check_same(directory, before, facts({"lr": tune.choice([0.1, 0.2])}, epochs=3, global_batch=8))
    check("errors/tune_other_sweep.txt", f"{refused.value}\n".replace(directory.path, "SWEEP"))


def test_r10_another_scheduler_or_searcher_or_number_of_trials_is_another_sweep() -> None:
    config, made = RunConfig(epochs=2), recipe(Regression, RunConfig(epochs=2))

    def of(**settings: Any) -> Any:
        sweep = SweepConfig(**settings)
        choice = Choice.of(None, None, sweep, config, SPACE)
        return description.facts(made, sweep, SPACE, choice, schedule(Regression(), config))["sweep"]

    before = of()
    assert (before["scheduler"], before["search"]) == ("AsyncHyperBandScheduler", "random")
    for change in ({"scheduler": "fifo"}, {"search": "optuna"}, {"trials": 3}, {"seed": 1}):
        assert of(**change) != before
    for same in ({"policy": "best"}, {"workers": 4}, {"concurrent": 2}):
        assert of(**same) == before, "these change how long it takes"


def test_r10_resume_is_explicit(tmp_path: Path) -> None:
    directory = RunDir.at(str(tmp_path), "sweep")
    assert description.earlier(directory, "auto") is None
    with pytest.raises(ResumeError):
        description.earlier(directory, "must")
    directory.write_json({"format": 1}, description.SWEEP)
    assert description.earlier(directory, "must") == {"format": 1}
    with pytest.raises(ResumeError):
        description.earlier(directory, "new")
    Path(directory.child(description.SWEEP)).write_text("{")
    with pytest.raises(ResumeError, match="is the JSON of a sweep"):
        description.earlier(directory, "auto")


def test_an_example_has_a_value_for_every_kind_of_domain_and_draws_nothing_from_the_programs_generator() -> None:
    np.random.seed(1)
    before = np.random.get_state()[1].tolist()
    space = {**SPACE, **{kind: make() for kind, make in DOMAINS.items() if kind != "function of the others"}}
    values = description.example(space)
    assert values.keys() == space.keys()
    assert (values["grid"], values["constant"], values["function"]) == (5, "constant", 0.5)
    assert values["choice"] in (1, "a")
    assert 0.01 <= values["lr"] <= 0.1
    assert np.random.get_state()[1].tolist() == before


def test_an_example_of_a_value_that_is_made_of_others_is_made_of_those_of_the_example() -> None:
    values = description.example({"twice": DOMAINS["function of the others"](), **SPACE})
    assert values["twice"] == values["lr"] * 2


def test_trials_are_counted_for_each_point_of_a_grid() -> None:
    assert description.num_trials(SPACE, 4) == 4
    assert description.num_trials({"a": tune.grid_search([1, 2, 3]), "b": tune.grid_search([1, 2]), **SPACE}, 2) == 12


def test_the_runs_are_compared_by_the_sweeps_metric_and_bear_its_name() -> None:
    config = description.run_config(Regression, RunConfig(), SweepConfig(metric="valid/mae", mode="max"), (1, 3))
    assert (config.name, config.best, config.workers) == ("regression-sweep", "max:valid/mae", (1, 3))
    with pytest.raises(ConfigError, match="go together"):
        description.run_config(Regression, RunConfig(), SweepConfig(metric="valid/mae"), None)


def test_a_sweep_has_trials_once_ray_tune_has_saved_it(tmp_path: Path) -> None:
    directory = RunDir.at(str(tmp_path), "sweep")
    assert not description.has_trials(directory)
    directory.write_json({}, "experiment_state-1.json")
    assert description.has_trials(directory)
