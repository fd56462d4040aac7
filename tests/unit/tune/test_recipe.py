"""What a trial's values stand for, and a recipe that stays itself in the process that packed it."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from raytrain.config import RunConfig
from raytrain.errors import ConfigError
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
    assert Packed(packed.data + b"").open() is made
