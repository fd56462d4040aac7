"""Elastic runs as trials of Ray Tune: what is reserved for one, and where trials cannot share in place."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest

from raytrain.config import RunConfig
from raytrain.elastic import contract
from raytrain.errors import ConfigError
from raytrain.tune import trainable as module
from raytrain.tune.recipe import Packed, recipe
from raytrain.tune.trainable import HEAD, as_trainable, check_elasticity, smallest_group, trainable
from raytrain.tune.trial import EndsInOrder, Terms
from tests.golden import check
from tests.support.tasks import Regression


def packed(**settings: Any) -> Packed:
    return Packed.of(recipe(Regression, RunConfig(**settings)))


def test_a_trial_begins_with_room_for_its_smallest_number_of_workers_and_its_own_process_on_the_head_node() -> None:
    group = smallest_group(packed(workers=(2, 8), accelerator="cpu", cpus_per_worker=3), {"lr": 0.1})
    assert group.bundles == [HEAD, {"CPU": 3.0}, {"CPU": 3.0}]
    gpus = smallest_group(packed(workers=1, accelerator="gpu"), {"lr": 0.1})
    assert gpus.bundles == [HEAD, {"CPU": 1.0, "GPU": 1.0}]


def test_the_smallest_number_may_be_what_is_searched() -> None:
    group = smallest_group(packed(workers=(1, 8), accelerator="cpu"), {"run.cpus_per_worker": 2})
    assert group.bundles == [HEAD, {"CPU": 2.0}]


@pytest.mark.parametrize(("values", "where"), [({"lrr": 0.1}, "sweep.space.lrr"), ({"lr": "quick"}, "lr")])
def test_r15_a_wrong_key_or_value_is_refused_before_the_trial_starts(values: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        smallest_group(packed(accelerator="cpu"), values)
    assert refused.value.where == where


def test_ray_tune_gets_a_function_that_knows_what_it_needs_and_ends_in_order() -> None:
    function: Any = trainable(Regression, RunConfig(workers=(2, 4), accelerator="cpu"))
    assert callable(function)
    assert function._resources({"lr": 0.1}).bundles[1:] == [{"CPU": 1.0}] * 2
    assert function.__mixins__ == (EndsInOrder,)


def test_the_function_runs_the_recipe_on_the_terms_that_it_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(module, "run_trial", lambda *arguments: ran.append(arguments))
    made, terms = recipe(Regression, RunConfig()), Terms("best", 4, "valid/loss")
    as_trainable(made, terms)({"lr": 0.1})
    assert ran == [(made, terms, {"lr": 0.1})]


def test_the_function_travels() -> None:
    function: Any = as_trainable(recipe(Regression, RunConfig(accelerator="cpu")), Terms())
    assert cloudpickle.loads(cloudpickle.dumps(function))._resources({"lr": 0.1}).bundles[0] == HEAD


def test_r15_trials_share_workers_in_place_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    check_elasticity(RunConfig())
    with pytest.raises(ConfigError) as refused:
        trainable(Regression, RunConfig(elasticity="restart"))
    check("errors/tune_restart.txt", f"{refused.value}\n")
    monkeypatch.setattr(contract, "violations", lambda: ["WorkerGroup.poll_status: not there"])
    with pytest.raises(ConfigError) as refused:
        check_elasticity(RunConfig())
    check("errors/tune_another_ray.txt", f"{refused.value}\n")
