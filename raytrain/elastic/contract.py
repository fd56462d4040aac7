"""Does this Ray Train have the internals that in-place elasticity was written for? Checked without starting Ray.

Lists each name, signature, field and attribute of Ray that `elastic` uses, and reports those that have changed. It is a file
of its own, apart from `internals`, since importing that fails with another Ray. Runs in the driver.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import ray

INTERNALS = "raytrain.elastic.internals"
CHECKED_ON = "2.60"
"""The version of Ray on which in-place elasticity is tested."""

SIGNATURES: dict[str, tuple[str, list[str]]] = {
    "TrainController.__init__": (
        "called with these by ElasticTrainer",
        ["train_fn_ref", "train_run_context", "scaling_policy", "failure_policy", "callbacks", "validation_config"],
    ),
    "TrainController._is_training_succeeded": ("overridden", ["worker_group_status"]),
    "TrainController._poll_workers": ("extended", []),
    "TrainController.run": ("called", []),
    "TrainController.get_result": ("called", []),
    "TrainController.get_worker_group": ("called", []),
    "WorkerGroup.__init__": ("extended", ["train_run_context", "worker_group_context", "callbacks"]),
    "WorkerGroup.create": ("called by the controller", ["train_run_context", "worker_group_context", "callbacks"]),
    "WorkerGroup._start_impl": ("overridden", ["worker_group_state_builder"]),
    "WorkerGroup.poll_status": ("overridden", ["timeout"]),
    "WorkerGroup._poll_workers_and_collect_errors": ("called", ["timeout"]),
    "WorkerGroup.shutdown": ("extended", []),
    "WorkerGroup.get_workers": ("called", []),
    "RayTrainWorker.__init__": ("called", []),
    "RayTrainWorker.get_metadata": ("called", []),
    "RayTrainWorker.run_train_fn": ("called", ["train_fn_ref"]),
    "RayTrainWorker.poll_status": ("called by Ray's poll", []),
    "RayTrainWorker.init_train_context": (
        "called with the first six",
        [
            *("train_run_context", "distributed_context", "synchronization_actor", "storage_context"),
            *("worker_callbacks", "controller_actor", "dataset_shard_provider", "checkpoint", "has_validation_fn"),
            "current_report_index",
        ],
    ),
    "RayTrainWorker.execute": ("called by the rendezvous", ["fn", "fn_args", "fn_kwargs"]),
    "FailurePolicy.__init__": ("called", ["failure_config"]),
    "FailurePolicy.make_decision": ("overridden", ["training_failed_error"]),
    "ScalingPolicy.__init__": ("called", ["scaling_config"]),
    "ScalingPolicy.make_decision_for_non_running_worker_group": ("overridden", []),
    "ScalingPolicy.make_decision_for_running_worker_group": (
        "overridden",
        ["worker_group_state", "worker_group_status"],
    ),
    "ScalingPolicy.after_controller_start": ("overridden", ["train_run_context"]),
    "ReplicaGroup.__init__": ("called", ["workers", "resources_per_worker", "callbacks"]),
    "PlacementGroupHandle.wait": ("overridden", ["timeout_seconds"]),
    "bundle_to_remote_args": ("called", ["bundle"]),
    "WorkerHealthCheckFailedError.__init__": ("read", ["message", "failure"]),
    "TorchTrainer._create_default_callbacks": ("overridden", []),
    "TorchTrainer._initialize_and_run_controller": ("overridden", ["controller_init_kwargs"]),
}
"""How each function is used, and its parameters besides `self`."""

FIELDS: dict[str, list[str]] = {
    "DistributedContext": ["world_rank", "world_size", "local_rank", "local_world_size", "node_rank"],
    "WorkerGroupState": ["start_time", "placement_group_handle", "workers", "sync_actor"],
    "WorkerGroupPollStatus": ["worker_statuses", "worker_rank_to_replica_group_rank"],
    "ResizeDecision": ["num_workers", "resources_per_worker"],
    "NoopDecision": [],
    "WorkerGroupContext": [
        *("run_attempt_id", "train_fn_ref", "num_workers", "resources_per_worker", "placement_strategy"),
        *("label_selector", "num_slices"),
    ],
    "Worker": [
        *("actor", "metadata", "resources", "distributed_context", "log_file_path", "placement_group_bundle_index"),
    ],
}
"""The fields of dataclasses."""

ATTRIBUTES: dict[str, set[str]] = {
    "WorkerGroup": {
        *("_train_run_context", "_storage_context", "_worker_group_context", "_worker_callbacks_to_propagate"),
        *("_worker_group_state", "_replica_groups", "_worker_rank_to_replica_group_rank", "_latest_poll_status"),
        *("_world_rank_to_ongoing_poll", "_worker_health_check_timeout_s"),
    },
    "TrainController": {"_health_check_interval_s"},
    "DataParallelTrainer": {"scaling_config", "run_config"},
    "ScalingPolicy": {"scaling_config"},
    "WorkerHealthCheckFailedError": {"health_check_failure"},
}
"""Attributes that an `__init__` sets."""

ABSTRACT: dict[str, set[str]] = {
    "FailurePolicy": {"make_decision"},
    "ScalingPolicy": {
        *("make_decision_for_non_running_worker_group", "make_decision_for_running_worker_group"),
        "_get_num_workers_for_resource_request",
    },
    "PlacementGroupHandle": {"placement_group", "ready", "wait", "shutdown"},
}
"""The abstract methods of a class, all of which `elastic` implements."""


def violations() -> list[str]:
    """Describes what in-place elasticity uses of Ray and is missing or has changed; empty if nothing is."""
    try:
        internals = importlib.import_module(INTERNALS)
    except (ImportError, AttributeError) as error:
        return [f"Ray {ray.__version__}: {error}"]
    missing = [name for name in internals.__all__ if getattr(internals, name, None) is None]
    if missing:
        return [f"{name} does not exist" for name in missing]
    return list(_differences(used_names()))


def parameters(function: Any) -> list[str]:
    """The parameters of a function, without `self` and the one that Ray adds to methods of actors."""
    return [name for name in inspect.signature(function).parameters if name not in ("self", "_ray_trace_ctx")]


def find(path: str, among: Mapping[str, Any]) -> Any:
    """'WorkerGroup.create' -> the method; None if it does not exist."""
    first, *rest = path.split(".")
    found = among.get(first)
    for name in rest:
        found = getattr(found, name, None)
    return found


def used_names() -> dict[str, Any]:
    """The objects of the tables, by name. Some are public in Ray, but used beyond what is documented."""
    from ray.train.torch import TorchTrainer

    bases = {cls.__name__: cls for cls in TorchTrainer.__mro__}
    return {**vars(importlib.import_module(INTERNALS)), "TorchTrainer": TorchTrainer} | {
        "DataParallelTrainer": bases.get("DataParallelTrainer")
    }


def _differences(names: Mapping[str, Any]) -> Iterator[str]:
    for path, (use, expected) in SIGNATURES.items():
        function = find(path, names)
        if not callable(function):
            yield f"{path}, {use}, does not exist"
        elif (found := parameters(function)) != expected:
            yield f"{path}, {use}, takes {_listed(found)} instead of {_listed(expected)}"
    for name, expected in FIELDS.items():
        cls = names.get(name)
        if not dataclasses.is_dataclass(cls):
            yield f"{name} is not a dataclass"
        elif (found := [field.name for field in dataclasses.fields(cls)]) != expected:
            yield f"{name} has {_listed(found)} instead of {_listed(expected)}"
    for name, attributes in ATTRIBUTES.items():
        code = getattr(find(f"{name}.__init__", names), "__code__", None)
        for attribute in sorted(attributes - set(code.co_names if code else ())):
            yield f"{name} sets no {attribute}"
    for name, methods in ABSTRACT.items():
        for method in sorted(set(getattr(names.get(name), "__abstractmethods__", ())) - methods):
            yield f"{name} requires {method}, which is not implemented here"


def _listed(names: list[str]) -> str:
    return f"({', '.join(names)})"
