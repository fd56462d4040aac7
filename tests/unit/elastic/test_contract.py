"""What is reported about a Ray with other internals, and that nothing but in-place elasticity needs them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from raytrain.elastic import contract, internals


def test_this_ray_keeps_the_contract() -> None:
    assert contract.violations() == []


def test_internals_that_cannot_be_imported_are_one_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, contract.INTERNALS, None)
    (found,) = contract.violations()
    assert contract.INTERNALS in found


def run_train_fn(self: Any, train_fn_ref: Any, attempt: int) -> None:
    return None


def set_failure(self: Any, message: str, failure: Any) -> None:
    self.failure = failure


@dataclass
class OtherFields:
    num_replicas: int


ONE_MORE = internals.FailurePolicy.__abstractmethods__ | {"forgive"}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("WorkerGroup", None, "does not exist"),
        ("RayTrainWorker.run_train_fn", run_train_fn, ", called, takes (train_fn_ref, attempt) instead of (train_fn_ref)"),
        ("TrainController.get_worker_group", None, ", called, does not exist"),
        ("ResizeDecision", OtherFields, "has (num_replicas) instead of (num_workers, resources_per_worker)"),
        ("NoopDecision", object, "is not a dataclass"),
        ("WorkerHealthCheckFailedError.__init__", set_failure, "sets no health_check_failure"),
        ("FailurePolicy.__abstractmethods__", ONE_MORE, "requires forgive, which is not implemented here"),
    ],
)
def test_changes_are_reported(monkeypatch: pytest.MonkeyPatch, name: str, value: Any, says: str) -> None:
    owner, _, attribute = name.rpartition(".")
    place = getattr(internals, owner) if owner else internals
    if value is None:
        monkeypatch.delattr(place, attribute)
    else:
        monkeypatch.setattr(place, attribute, value)
    subject = name if says.startswith(",") else owner or name
    assert contract.violations() == [subject + (says if says.startswith(",") else f" {says}")]


def test_restart_mode_can_be_imported_without_the_internals_of_ray_train() -> None:
    code = (
        f"import sys; sys.modules['{contract.INTERNALS}'] = None; import raytrain.launch.trainer, raytrain.cli.job; "
        "from raytrain.elastic.contract import violations; print(len(violations()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"
