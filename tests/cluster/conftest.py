"""What cluster tests share: one small Ray for a module."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.cluster import namespaces


@pytest.fixture(scope="module")
def small_ray() -> Iterator[None]:
    """Two CPUs, for the whole module; runs inside use it, since it is there."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    path.touch()
    return path


@pytest.fixture(scope="session", autouse=True)
def played_in_namespaces(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Future[dict[str, Any]]]:
    """Begins with the first cluster test, since these scripts take long and disturb nobody."""
    is_wanted = any(item.path.name == "test_namespaces.py" for item in request.session.items)
    return namespaces.start_all(tmp_path_factory.mktemp("namespaces")) if is_wanted and namespaces.can_be_made() else {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What the scripts have told is looked at last: they have been played by then."""
    items.sort(key=lambda item: item.path.name == "test_namespaces.py")


OURS = ("RayTrainWorker", "RendezvousActor", "AttemptRendezvous", "EventSink", "Broker", "ImplicitFunc")


@pytest.fixture(autouse=True)
def nothing_of_ours_is_left() -> Iterator[None]:
    """After each test nothing of ours is alive or reserved in the Ray that the test leaves behind, if it leaves one."""
    yield
    if not ray.is_initialized():
        return
    until = time.monotonic() + 15  # Ray takes a while to notice the end of a process
    while (left := what_is_left()) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []


def what_is_left() -> list[str]:
    actors = ray._private.state.actors().values()
    groups = ray.util.placement_group_table().values()
    free, total = ray.available_resources().get("CPU", 0.0), ray.cluster_resources().get("CPU", 0.0)
    return [
        *(f"actor {actor['ActorClassName']}" for actor in actors if actor["State"] != "DEAD" and is_ours(actor)),
        *(f"placement group {group['placement_group_id']}" for group in groups if group["state"] != "REMOVED"),
        *([f"{total - free:g} CPUs are taken"] if free != total else []),
    ]


def is_ours(actor: dict[str, str]) -> bool:
    return actor["ActorClassName"].startswith(OURS)
