"""What a sweep is, and whether the one that is there is the same."""

from __future__ import annotations

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
    space = {**SPACE, "a": tune.grid_search([5, 6]), "b": "constant", "c": tune.randint(1, 3), "d": tune.quniform(0, 1, 0.5)}
    values = description.example(space)
    assert values.keys() == space.keys()
    assert (values["a"], values["b"]) == (5, "constant")
    assert 0.01 <= values["lr"] <= 0.1
    assert np.random.get_state()[1].tolist() == before


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
