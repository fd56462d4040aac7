"""Whether there is room for workers, and which devices they get; without a Ray."""

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
    """The resources of an embedded Ray of one node."""
    resources = {"CPU": 2.0}
    monkeypatch.setattr(cluster.ray._private.worker, "_global_node", SimpleNamespace(is_head=lambda: True))
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: resources)
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [{}])
    return resources


@pytest.mark.usefixtures("machine")
def test_r11_workers_for_which_an_embedded_ray_has_no_room_are_refused() -> None:
    config = RunConfig(workers="3:8")
    with pytest.raises(ResourceError) as caught:
        check_room(config, worker_resources(config, "gpu"))
    check("errors/no_room.txt", f"{caught.value}\n")


@pytest.mark.usefixtures("machine")
def test_what_fits_is_not_refused_and_the_largest_number_need_not_fit() -> None:
    config = RunConfig(workers="2:8")
    check_room(config, worker_resources(config, "cpu"))


def test_r11_a_cluster_may_grow_so_nothing_is_refused_at_once(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.ray._private.worker, "_global_node", SimpleNamespace(is_head=lambda: False))
    check_room(RunConfig(workers=64), {"CPU": 1.0})


def test_gpus_are_taken_where_there_are_any(machine: dict[str, float]) -> None:
    assert [choose_accelerator(setting) for setting in ("auto", "cpu", "gpu")] == ["cpu", "cpu", "gpu"]
    machine["GPU"] = 1.0
    assert choose_accelerator("auto") == "gpu"


def test_a_ray_is_started_unless_an_address_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert not is_somewhere()
    monkeypatch.setitem(os.environ, "RAY_ADDRESS", "10.0.0.1:6379")
    assert is_somewhere()
