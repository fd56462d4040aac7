"""The trainer of one attempt: public Ray Train, that starts nothing again and forms no process group."""

from __future__ import annotations

from typing import Any

import pytest
from ray.train import BackendConfig, FailureConfig
from ray.train.torch import TorchTrainer

from raytrain.elastic import plain_ray
from raytrain.elastic.plain_ray import Means, NoGroup, never_again, plain_trainer


def means(**more: Any) -> Means:
    given: dict[str, Any] = {
        "work": print,
        "connect": lambda actor, first: {},
        "open_rendezvous": lambda num, reached, after: None,
        "resources": {"CPU": 0.2},
        "use_gpu": False,
        "storage": "/nowhere",
        "is_complete": lambda: False,
    }
    return Means(**given | more)


def test_nothing_is_tried_again_by_ray_train() -> None:
    config = never_again()
    assert (config.max_failures, config.controller_failure_limit, config.max_preemption_failures) == (0, 0, 0)


def test_a_ray_that_knows_fewer_budgets_is_given_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_ray, "BUDGETS", ("max_failures", "max_moons"))
    assert never_again() == FailureConfig(max_failures=0)


def test_ray_train_forms_no_process_group_and_shares_no_gpus() -> None:
    backend = NoGroup().backend_cls
    assert backend is BackendConfig().backend_cls
    assert not backend.share_cuda_visible_devices


def test_a_group_has_as_many_workers_and_resources_as_it_is_told() -> None:
    def work(config: Any) -> None:
        return None

    trainer = plain_trainer(means(), work, {"a": 1}, 3, "attempt-2")
    assert isinstance(trainer, TorchTrainer)
    assert trainer.scaling_config.num_workers == 3
    assert trainer.scaling_config.resources_per_worker == {"CPU": 0.2}
    assert (trainer.run_config.name, trainer.train_loop_config) == ("attempt-2", {"a": 1})
    assert trainer.backend_config.backend == "gloo"
