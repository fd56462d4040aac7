"""What only Ray's source shows of what raytrain takes from the inside of Ray Train; Ray is not started.

Names, signatures, fields and attributes are checked by `raytrain/elastic/contract.py` itself. A Ray upgrade that changes one
of those here fails here and says what changed; `raytrain/elastic/internals.py` is then the place to look at.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import TrainingFailedError

from raytrain.elastic import contract, internals, trainer, worker


def source(thing: Any) -> str:
    return textwrap.dedent(inspect.getsource(thing))


def test_ray_is_of_the_version_on_which_in_place_elasticity_was_checked() -> None:
    assert ray.__version__.startswith(f"{contract.CHECKED_ON}."), f"ray is {ray.__version__}: check what follows"
    requires = importlib.metadata.requires("raytrain") or []
    assert any(line.startswith("ray[") and f">={contract.CHECKED_ON}" in line for line in requires)


def test_nothing_is_imported_that_the_contract_does_not_list() -> None:
    imported = {
        alias.name
        for node in ast.walk(ast.parse(Path(internals.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    assert imported - {"state"} == set(internals.__all__)
    assert contract.violations() == []


def test_what_is_abstract_in_ray_is_written_here() -> None:
    classes = [trainer.NoRetries, trainer.StartOnce, worker.NoPlacementGroup]
    assert [inspect.isabstract(cls) for cls in classes] == [False] * 3
    decision = trainer.StartOnce(
        ScalingConfig(num_workers=3, resources_per_worker={"CPU": 0.5})
    ).make_decision_for_non_running_worker_group()
    assert (decision.num_workers, decision.resources_per_worker) == (3, {"CPU": 0.5})


def test_fit_hands_the_controller_what_is_replaced_here() -> None:
    """`ElasticTrainer` replaces the two policies by keyword, and gives all else on."""
    keywords = [
        {keyword.arg for keyword in node.keywords}
        for node in ast.walk(ast.parse(source(DataParallelTrainer.fit)))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "_initialize_and_run_controller"
    ]
    expected = set(contract.parameters(internals.TrainController.__init__))
    assert keywords == [expected], f"fit() calls _initialize_and_run_controller with {keywords} now"
    assert issubclass(TorchTrainer, DataParallelTrainer), "ray.train.torch.TorchTrainer is another one now: Train V2 is off"


CALLS = [
    ("TrainController._start_worker_group", "self.worker_group_cls.create(", 1),
    ("TrainController._poll_workers", "self._worker_group.poll_status(timeout=self._health_check_interval_s)", 1),
    ("TrainController._step", "self._is_training_succeeded(", 1),
    ("TrainController.__init__", "ENABLE_PREEMPTION_WATCHER_ENV_VAR", 2),
    ("TrainController.__init__", "ENABLE_CONTROLLER_STRUCTURED_LOGGING_ENV_VAR", 1),
    ("TrainController", "current_actor", 0),
    ("TrainController", "get_actor_id", 0),
    ("TrainController", "exit_actor()", 2),
    ("TrainController._poll_workers", "exit_actor()", 1),
    ("TrainController.abort", "exit_actor()", 1),
    ("WorkerGroup._poll_workers_and_collect_errors", "WorkerHealthCheckFailedError(", 1),
    ("WorkerGroup._poll_workers_and_collect_errors", "self._worker_health_check_timeout_s", 1),
    ("WorkerGroup._get_poll_tasks", "actor.poll_status.remote()", 1),
    ("WorkerGroup.shutdown", "self._worker_group_state.shutdown()", 1),
]
"""A controller in the driver must not end its process, as an actor's would: `exit_actor` is where no run comes to."""


def test_ray_calls_what_is_replaced_here_and_nothing_that_needs_an_actor() -> None:
    found = [source(contract.find(path, contract.used_names())).count(text) for path, text, _ in CALLS]
    other = [f"{call}, but {count} times" for call, count in zip(CALLS, found, strict=True) if count != call[2]]
    assert other == [], "where, what, and how often it was there"


def test_an_empty_group_has_not_finished_and_a_finished_one_has() -> None:
    def status(*running: bool) -> Any:
        return internals.WorkerGroupPollStatus(
            worker_statuses={rank: SimpleNamespace(running=is_on, error=None) for rank, is_on in enumerate(running)},
            worker_rank_to_replica_group_rank=None,
        )

    succeeded = trainer.ElasticController._is_training_succeeded
    assert [succeeded(status()), succeeded(status(True, False)), succeeded(status(False, False))] == [False, False, True]


def test_errors_and_preemptions_reach_the_driver_as_is_read_there() -> None:
    assert ActorDiedError().preempted is False
    for error, attribute in (
        (ray.train.WorkerGroupError, "worker_failures"),
        (ray.train.ControllerError, "controller_failure"),
    ):
        assert issubclass(error, TrainingFailedError)
        assert attribute in contract.parameters(error.__init__)


def test_draining_nodes_are_known_with_their_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = source(type(internals.state).get_draining_nodes)
    assert "-> Dict[str, int]" in text or "-> dict[str, int]" in text
    assert "deadline" in text
    monkeypatch.setattr(internals, "state", SimpleNamespace(get_draining_nodes=lambda: {"a": 1_500, "b": 0}))
    assert internals.draining_nodes() == {"a": 1.5, "b": 0.0}


def test_the_controller_runs_in_a_thread_of_the_driver() -> None:
    """Ray Train decorates it as an actor only where it makes one, so the class itself is a plain one."""
    assert inspect.isclass(internals.TrainController)
    assert inspect.iscoroutinefunction(internals.TrainController.run)
    assert not inspect.iscoroutinefunction(internals.TrainController.get_result)
