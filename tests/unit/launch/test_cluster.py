"""The cluster has room for the workers, and which devices they use; without Ray."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain.config import RunConfig
from raytrain.errors import ResourceError
from raytrain.launch import cluster
from raytrain.launch.cluster import check_room, choose_accelerator, is_somewhere, worker_resources
from tests.golden import check


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The resources of an embedded Ray with one node."""
    resources = {"CPU": 2.0}
    monkeypatch.setattr(cluster.ray._private.worker, "_global_node", SimpleNamespace(is_head=lambda: True))
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: resources)
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [{}])
    return resources


@pytest.mark.usefixtures("machine")
def test_r11_more_workers_than_an_embedded_ray_has_room_for_are_refused() -> None:
    config = RunConfig(workers="3:8")
    with pytest.raises(ResourceError) as caught:
        check_room(config, worker_resources(config, "gpu"))
    check("errors/no_room.txt", f"{caught.value}\n")


def test_r11_only_an_embedded_ray_without_room_for_the_fewest_workers_is_refused(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_room(RunConfig(workers="2:8"), {"CPU": 1.0})
    monkeypatch.setattr(cluster.ray._private.worker, "_global_node", SimpleNamespace(is_head=lambda: False))
    check_room(RunConfig(workers=64), {"CPU": 1.0})


def test_auto_chooses_gpus_if_the_cluster_has_any(machine: dict[str, float]) -> None:
    assert [choose_accelerator(setting) for setting in ("auto", "cpu", "gpu")] == ["cpu", "cpu", "gpu"]
    machine["GPU"] = 1.0
    assert choose_accelerator("auto") == "gpu"


def test_ray_is_started_unless_an_address_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert not is_somewhere()
    monkeypatch.setitem(os.environ, "RAY_ADDRESS", "10.0.0.1:6379")
    assert is_somewhere()
