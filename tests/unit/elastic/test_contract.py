"""What a run finds out about a Ray that is not the one it was written for, and that nothing else needs that Ray."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from raytrain.elastic import contract, internals


def test_this_ray_keeps_the_contract() -> None:
    assert contract.violations() == []


def test_a_name_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(internals, "WorkerGroup")
    assert contract.violations() == ["there is no WorkerGroup"]


def test_an_inside_that_cannot_be_imported_is_one_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, contract.INTERNALS, None)
    (found,) = contract.violations()
    assert contract.INTERNALS in found


def run_train_fn(self: Any, train_fn_ref: Any, attempt: int) -> None:
    return None


def broken_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals.RayTrainWorker, "run_train_fn", run_train_fn)


def missing_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(internals.TrainController, "get_worker_group")


def other_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class ResizeDecision:
        num_replicas: int

    monkeypatch.setattr(internals, "ResizeDecision", ResizeDecision)


def no_dataclass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "NoopDecision", object)


def other_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    def __init__(self: Any, message: str, failure: Any) -> None:
        self.failure = failure

    monkeypatch.setattr(internals.WorkerHealthCheckFailedError, "__init__", __init__)


def one_more_method(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = internals.FailurePolicy.__abstractmethods__ | {"forgive"}
    monkeypatch.setattr(internals.FailurePolicy, "__abstractmethods__", wanted)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            broken_signature,
            "RayTrainWorker.run_train_fn, called, takes (train_fn_ref, attempt) instead of (train_fn_ref)",
        ),
        (missing_method, "TrainController.get_worker_group, called, is not there"),
        (other_fields, "ResizeDecision has (num_replicas) instead of (num_workers, resources_per_worker)"),
        (no_dataclass, "NoopDecision is no dataclass"),
        (other_attribute, "WorkerHealthCheckFailedError sets no health_check_failure"),
        (one_more_method, "FailurePolicy wants forgive, which is not written here"),
    ],
)
def test_what_has_changed_is_said(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], says: str
) -> None:
    change(monkeypatch)
    assert contract.violations() == [says]


def test_all_that_a_run_with_restarts_needs_can_be_imported_without_the_inside_of_ray_train() -> None:
    code = (
        f"import sys; sys.modules['{contract.INTERNALS}'] = None; import raytrain.launch.trainer, raytrain.cli.job; "
        "from raytrain.elastic.contract import violations; print(len(violations()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"
