"""What cluster tests share: one Ray, which nothing of ours may outlive a test in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import ray

from raytrain.elastic.fork_server import started_server
from tests.cluster import namespaces
from tests.cluster.nodes import Nodes, SharedRay
from tests.cluster.script import Stage


@pytest.fixture(scope="session", autouse=True)
def forked_from_one_server() -> Iterator[None]:
    """The workers of all nodes and drivers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        with started_server():
            yield


@pytest.fixture(scope="session")
def shared() -> Iterator[SharedRay]:
    one = SharedRay()
    yield one
    one.close()


@pytest.fixture(scope="module")
def small_ray(shared: SharedRay) -> str:
    """Two CPUs; runs inside use it, since it is there. Its address."""
    return shared.small()


@pytest.fixture
def nodes(shared: SharedRay) -> Iterator[Nodes]:
    """No nodes yet; those of the test are gone after it."""
    yield Nodes(shared.head())
    shared.head()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    path.touch()
    return path


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "stage")


@pytest.fixture(scope="session", autouse=True)
def played_in_namespaces(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Future[dict[str, Any]]]:
    """Begins with the first cluster test, since these scripts take long and disturb nobody."""
    is_wanted = any(item.path.name == "test_namespaces.py" for item in request.session.items)
    return namespaces.start_all(tmp_path_factory.mktemp("namespaces")) if is_wanted and namespaces.can_be_made() else {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A Ray of a test's own comes first, then the small one, then the cluster; what the scripts have told is last."""

    def order(item: pytest.Item) -> tuple[bool, bool, bool]:
        names = getattr(item, "fixturenames", ())
        return item.path.name == "test_namespaces.py", "shared" in names, "small_ray" not in names

    items.sort(key=order)


OURS = ("RayTrainWorker", "RendezvousActor", "AttemptRendezvous", "EventWriter", "Broker", "ImplicitFunc")


@pytest.fixture(autouse=True)
def nothing_of_ours_is_left() -> Iterator[None]:
    """After each test nothing of ours is alive or reserved in the Ray that the test leaves behind, if it leaves one."""
    yield
    assert left_after(15) == []


def left_after(limit_s: float) -> list[str]:
    """What is left once nothing is, or some seconds are over: Ray takes a while to notice the end of a process."""
    until = time.monotonic() + limit_s
    while ray.is_initialized() and (left := what_is_left()):
        if time.monotonic() > until:
            return left
        time.sleep(0.1)
    return []


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
