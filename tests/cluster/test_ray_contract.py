"""What raytrain takes from the inside of Ray Train: each name, signature and attribute, checked without starting Ray.

A Ray upgrade that changes one of them fails here and says what changed; `raytrain/elastic/internals.py` is then the place
to look at. What a run checks itself, and the tables of it, are in `raytrain/elastic/contract.py`.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import inspect
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayActorError
from ray.train import ScalingConfig
from ray.train.backend import BackendConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup as _WorkerGroup
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import TrainingFailedError

from raytrain.elastic import contract, controller, internals, lone_workers
from raytrain.elastic.contract import parameters


def source(thing: Any) -> str:
    return textwrap.dedent(inspect.getsource(thing))


def attributes_set(cls: type) -> set[str]:
    """Attributes of `self` that the class's `__init__` sets."""
    nodes = ast.walk(ast.parse(source(cls.__init__)))  # type: ignore[misc]
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def test_ray_is_of_the_version_on_which_in_place_elasticity_was_checked() -> None:
    assert ray.__version__.startswith(f"{contract.CHECKED_ON}."), f"ray is {ray.__version__}: check what follows"
    requires = importlib.metadata.requires("raytrain") or []
    assert any(line.startswith("ray[") and f">={contract.CHECKED_ON}" in line for line in requires)


@pytest.mark.parametrize("name", internals.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(internals, name, None) is not None, f"Ray Train has no {name} any more"


def test_nothing_is_imported_that_is_not_listed() -> None:
    imported = {
        alias.name
        for node in ast.walk(ast.parse(Path(internals.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    assert imported - {"state"} == set(internals.__all__)


@pytest.mark.parametrize("path", contract.SIGNATURES)
def test_signatures_are_those_that_are_used(path: str) -> None:
    use, expected = contract.SIGNATURES[path]
    found = parameters(contract.find(path, contract.used_names()))
    assert found == expected, f"{path}, {use}: it takes {found} now"


@pytest.mark.parametrize("name", contract.ATTRIBUTES)
def test_attributes_that_are_used_are_set(name: str) -> None:
    missing = contract.ATTRIBUTES[name] - attributes_set(contract.used_names()[name])
    assert not missing, f"{name}.__init__ sets no {', '.join(sorted(missing))} any more"


@pytest.mark.parametrize("name", contract.FIELDS)
def test_fields_are_those_that_are_used(name: str) -> None:
    found = [field.name for field in dataclasses.fields(contract.used_names()[name])]
    assert found == contract.FIELDS[name], f"{name} has the fields {found} now"


def test_what_a_run_checks_before_it_trusts_this_ray_holds() -> None:
    assert contract.violations() == []


@pytest.mark.parametrize(
    ("base", "implemented"),
    [
        (internals.FailurePolicy, controller.EndOnErrors),
        (internals.ScalingPolicy, controller.StartOnce),
        (internals.PlacementGroupHandle, lone_workers.NoPlacementGroup),
    ],
)
def test_what_is_abstract_in_ray_is_written_here(base: type, implemented: type) -> None:
    assert base.__abstractmethods__, f"{base.__name__} is not abstract any more"  # type: ignore[attr-defined]
    assert set(base.__abstractmethods__) == contract.ABSTRACT[base.__name__]  # type: ignore[attr-defined]
    left = implemented.__abstractmethods__  # type: ignore[attr-defined]
    assert not left, f"{base.__name__} wants {', '.join(sorted(left))} now"


def test_the_policies_and_the_placement_can_be_made() -> None:
    config = ScalingConfig(num_workers=3, resources_per_worker={"CPU": 0.5})
    decision = controller.StartOnce(config).make_decision_for_non_running_worker_group()
    assert (decision.num_workers, decision.resources_per_worker) == (3, {"CPU": 0.5})
    policy = controller.EndOnErrors(None)  # type: ignore[arg-type]
    assert policy.make_decision(training_failed_error=Exception()) is internals.FailureDecision.RAISE
    place = lone_workers.NoPlacementGroup()
    assert place.wait(0)
    assert place.placement_group is None


def test_the_trainer_is_the_one_whose_methods_are_overridden() -> None:
    assert issubclass(TorchTrainer, DataParallelTrainer), "ray.train.torch.TorchTrainer is another one now: Train V2 is off"
    assert "torch_config" in parameters(TorchTrainer.__init__)
    assert issubclass(controller.NoBackendConfig().backend_cls, internals.Backend)
    assert isinstance(BackendConfig.backend_cls, property), "BackendConfig.backend_cls is no property any more"


def test_fit_hands_the_controller_what_is_replaced_here() -> None:
    """`ElasticTrainer` replaces the two policies by keyword, and gives all else on."""
    called = ast.walk(ast.parse(source(DataParallelTrainer.fit)))
    keywords = [
        {keyword.arg for keyword in node.keywords}
        for node in called
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "_initialize_and_run_controller"
    ]
    expected = set(parameters(internals.TrainController.__init__))
    assert keywords == [expected], f"fit() calls _initialize_and_run_controller with {keywords} now"


def test_the_controller_makes_its_group_by_the_class_that_is_replaced_here() -> None:
    assert internals.TrainController.worker_group_cls is _WorkerGroup
    text = source(internals.TrainController._start_worker_group)
    assert "self.worker_group_cls.create(" in text, "TrainController starts its worker group in another way now"


def test_the_controller_polls_as_often_as_it_is_told_and_asks_whether_training_succeeded() -> None:
    text = source(internals.TrainController._poll_workers)
    assert "self._worker_group.poll_status(timeout=self._health_check_interval_s)" in text
    assert "self._is_training_succeeded(" in source(internals.TrainController._step)


def test_an_empty_group_has_not_finished_and_a_finished_one_has() -> None:
    def status(*running: bool) -> Any:
        return internals.WorkerGroupPollStatus(
            worker_statuses={rank: SimpleNamespace(running=is_on, error=None) for rank, is_on in enumerate(running)},
            worker_rank_to_replica_group_rank=None,
        )

    succeeded = controller.ElasticController._is_training_succeeded
    assert [succeeded(status()), succeeded(status(True, False)), succeeded(status(False, False))] == [False, False, True]


def test_the_worker_group_polls_workers_and_reports_losses_as_is_read_here() -> None:
    text = source(internals.WorkerGroup._poll_workers_and_collect_errors)
    assert "WorkerHealthCheckFailedError(" in text
    assert "self._worker_health_check_timeout_s" in text
    assert "actor.poll_status.remote()" in source(internals.WorkerGroup._get_poll_tasks)


def test_a_group_state_can_end_in_another_way() -> None:
    assert "self._worker_group_state.shutdown()" in source(internals.WorkerGroup.shutdown)
    assert not parameters(internals.WorkerGroupState.shutdown)


def test_metadata_of_a_worker_has_its_node_and_process() -> None:
    returned = inspect.signature(internals.RayTrainWorker.get_metadata).return_annotation
    assert {field.name for field in dataclasses.fields(returned)} >= {"node_ip", "node_id", "pid"}


def test_resources_become_arguments_of_an_actor() -> None:
    arguments = internals.bundle_to_remote_args({"CPU": 0.5, "GPU": 1, "special": 2})
    assert arguments == {"num_cpus": 0.5, "num_gpus": 1, "memory": 0, "resources": {"special": 2}}


def test_ray_tells_whether_an_actor_was_lost_by_preemption() -> None:
    assert isinstance(RayActorError.preempted, property)
    assert ActorDiedError().preempted is False


def test_errors_reach_the_driver_as_is_read_there() -> None:
    assert issubclass(ray.train.WorkerGroupError, TrainingFailedError)
    assert issubclass(ray.train.ControllerError, TrainingFailedError)
    assert "worker_failures" in parameters(ray.train.WorkerGroupError.__init__)
    assert "controller_failure" in parameters(ray.train.ControllerError.__init__)


def test_what_ray_would_start_beside_the_controller_can_be_switched_off_when_it_is_made() -> None:
    assert controller.QUIET == {
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    }
    made = source(internals.TrainController.__init__)
    for name in ("ENABLE_PREEMPTION_WATCHER_ENV_VAR", "ENABLE_CONTROLLER_STRUCTURED_LOGGING_ENV_VAR"):
        assert name in made, f"TrainController.__init__ does not read {name} any more"


def test_the_controller_can_be_made_in_the_driver_and_run_in_a_thread() -> None:
    """Ray Train decorates it as an actor only where it makes one, so the class itself is a plain one."""
    assert inspect.isclass(internals.TrainController)
    assert inspect.iscoroutinefunction(internals.TrainController.run)
    assert not inspect.iscoroutinefunction(internals.TrainController.get_result)
    assert issubclass(controller.ElasticController, internals.TrainController)
    for name in ("current_actor", "get_actor_id"):
        assert name not in source(internals.TrainController), f"the controller uses its own {name} now"


def test_a_terminal_controller_is_not_polled_again_since_it_would_end_its_process_as_an_actor() -> None:
    """`exit_actor` is called in two places, neither of which a run in the driver comes to: after an abort."""
    text = source(internals.TrainController)
    assert text.count("exit_actor()") == 2
    assert source(internals.TrainController._poll_workers).count("exit_actor()") == 1
    assert source(internals.TrainController.abort).count("exit_actor()") == 1


def test_nodes_that_are_announced_to_go_away_are_known_with_their_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = source(type(internals.state).get_draining_nodes)
    assert "-> Dict[str, int]" in text or "-> dict[str, int]" in text
    assert "deadline" in text
    monkeypatch.setattr(internals, "state", SimpleNamespace(get_draining_nodes=lambda: {"a": 1_500, "b": 0}))
    assert internals.draining_nodes() == {"a": 1.5, "b": 0.0}


def test_an_actor_is_told_whether_it_was_started_again() -> None:
    assert isinstance(ray.runtime_context.RuntimeContext.was_current_actor_reconstructed, property)
