"""What a trial's values stand for, and a recipe that stays itself in the process that packed it."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from raytrain.config import RunConfig
from raytrain.errors import ConfigError
from raytrain.tune import recipe as module
from raytrain.tune.recipe import Packed, recipe
from tests.support.tasks import Gated, Regression


def make(rate: float, gate: str = "") -> Gated:
    return Gated(lr=rate * 2, gate=gate)


def test_values_are_fields_of_the_task_and_settings_of_the_run() -> None:
    made = recipe(Gated, RunConfig(epochs=2, storage="here"), {"gate": "g"})
    task, config = made.resolve({"lr": np.float64(0.5), "run.global_batch": np.int64(32)}, name="trial-0001")
    assert (task, config.global_batch, config.epochs, config.name) == (Gated(lr=0.5, gate="g"), 32, 2, "trial-0001")
    assert config.storage == str(Path("here").absolute()), "trials run elsewhere"


def test_a_function_can_make_the_task_of_its_parameters() -> None:
    task, _ = recipe(make, None, {"gate": "g"}).resolve({"rate": 0.1})
    assert task == Gated(lr=0.2, gate="g")


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"lrr": 0.1}, "sweep.space.lrr"),
        ({"run.global_bach": 1}, "sweep.space.run.global_bach"),
        ({"run.name": "x"}, "sweep.space.run.name"),
        ({"lr": "quick"}, "lr"),
        ({"run.global_batch": -1}, "run.global_batch"),
    ],
)
def test_r15_what_is_unknown_or_wrong_is_refused_by_name(values: dict[str, object], where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        recipe(Regression, None).resolve(values)
    assert refused.value.where == where


def test_a_packed_recipe_is_itself_where_it_was_packed_and_equal_elsewhere() -> None:
    made = recipe(Regression, RunConfig(epochs=2))
    packed = pickle.loads(pickle.dumps(Packed.of(made)))
    assert packed.open() is made


def test_r15_a_recipe_opens_equal_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Packed.of(recipe(Gated, RunConfig(epochs=2), {"gate": "g"}))
    monkeypatch.setattr(module, "_opened", {})
    opened = packed.open()
    assert opened is packed.open(), "once per process"
    assert opened.resolve({"lr": 0.5}) == (Gated(lr=0.5, gate="g"), opened.config)
    assert (opened.config.epochs, opened.fields) == (2, ["lr", "gate"])


def test_a_trials_value_goes_before_what_is_fixed_and_the_trials_own_settings_before_both() -> None:
    made = recipe(Regression, RunConfig(seed=1, epochs=2), {"lr": 0.1})
    task, config = made.resolve({"lr": 0.2, "run.seed": 7}, epochs=5)
    assert (task, config.seed, config.epochs) == (Regression(lr=0.2), 7, 5)
    assert made.config.seed == 1


def test_numbers_of_numpy_become_plain_ones() -> None:
    _, config = recipe(Regression, None).resolve({"run.seed": np.int64(7), "run.clip_norm": np.float32(0.5)})
    assert (type(config.seed), type(config.clip_norm)) == (int, float)
    seen: list[type] = []

    def make_of(rate: object, name: object) -> Gated:
        seen.extend([type(rate), type(name)])
        return Gated()

    recipe(make_of, None).resolve({"rate": np.float32(0.5), "name": np.str_("a")})
    assert seen == [float, str]


def test_a_function_is_checked_by_its_parameters_and_a_class_that_is_no_task_has_none() -> None:
    assert recipe(make, None).fields == ["rate", "gate"]
    with pytest.raises(ConfigError) as refused:
        recipe(make, None).resolve({"rat": 0.1})
    assert refused.value.where == "sweep.space.rat"


def test_storage_elsewhere_stays_as_it_is() -> None:
    assert recipe(Regression, RunConfig(storage="s3://bucket/runs")).config.storage == "s3://bucket/runs"
