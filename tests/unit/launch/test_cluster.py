"""The cluster has room for the workers, and which devices they use; without Ray."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import services, utils

from raytrain.config import RunConfig
from raytrain.errors import ConfigError, ResourceError
from raytrain.launch import cluster
from raytrain.launch.cluster import check_room, choose_accelerator, connected, is_somewhere, worker_resources
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


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `ray.init` does, one call after the other; `ray.shutdown` is counted by None."""
    actions: list[Any] = []
    monkeypatch.setattr(cluster.ray, "init", lambda **settings: actions.pop(0)())
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: actions.append(None))
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    return actions


def failing(error: Exception) -> Any:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265"])
def test_r11_an_address_of_another_kind_is_refused(address: str, init: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError) as caught, connected():
        pass
    check("errors/ray_address.txt", str(caught.value).replace(address, "ADDRESS") + "\n")


def test_r6_a_ray_that_does_not_answer_is_refused_within_the_start_timeout(
    init: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody listens, and where somebody listens who never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        ports = closed.getsockname()[1], silent.getsockname()[1]
        closed.close()
        for port, found in zip(ports, ("Connection refused", "does not speak as Ray's head does"), strict=True):
            monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
            start = time.monotonic()
            text = rf"(?s)RAY_ADDRESS.*{port}: .*{found}.*start_timeout_s = 0\.3"
            with pytest.raises(ResourceError, match=text), connected(0.3):
                pass
            assert time.monotonic() - start < 15


def test_r11_a_ray_that_refuses_is_told(init: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    init.append(failing(RuntimeError("Version mismatch: the cluster has Ray 2.61.0")))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ResourceError, match="value: auto: Version mismatch"), connected():
        pass
    assert init == [None], "it is not left half connected"


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_r11_a_temporary_directory_that_is_too_long_for_sockets_is_refused(
    variable: str, init: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = "/mnt/" + "scratch/" * 12
    monkeypatch.setenv(variable, directory)
    socket_path = f"{directory}ray/session_2026-12-03_06-46-00_000000_4711/sockets/plasma_store"
    init.append(lambda: utils.validate_socket_filepath(socket_path))
    with pytest.raises(ResourceError) as caught, connected():
        pass
    check("errors/long_tmpdir.txt", str(caught.value).replace(variable, "RAY_TMPDIR", 1) + "\n")


@pytest.mark.parametrize("is_writable", [True, False])
def test_r11_a_home_directory_that_cannot_be_written_is_not_needed(
    is_writable: bool, init: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would keep the password of its new cluster there."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / ("home" if is_writable else "file")))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # restores what `connected` sets
        monkeypatch.delenv(name)
    init.append(lambda: None)
    with connected():
        assert ("RAY_AUTH_TOKEN" in os.environ) == (not is_writable)


def test_r11_a_ray_that_cannot_be_started_here_is_told(init: list[Any]) -> None:
    init.append(failing(PermissionError(13, "Permission denied", "/tmp/ray")))
    text = r"(?s)Ray on this machine\n.*Permission denied: '/tmp/ray'.*set RAY_TMPDIR"
    with pytest.raises(ResourceError, match=text), connected():
        pass


def test_r16_rays_processes_have_sessions_of_their_own_and_the_driver_its_handlers(init: list[Any]) -> None:
    """A signal to the driver's group does not reach them, and SIGTERM during the start is not Ray's to handle."""
    found: dict[str, Any] = {}

    def start() -> None:
        process = services.ConsolePopen(["sleep", "60"])
        found["session"] = os.getsid(process.pid)
        process.kill()
        process.wait()
        utils.set_sigterm_handler(lambda number, frame: None)
        found["handler"] = signal.getsignal(signal.SIGTERM)

    init.append(start)
    before = services.ConsolePopen, utils.set_sigterm_handler, signal.getsignal(signal.SIGTERM)
    with connected():
        assert (services.ConsolePopen, utils.set_sigterm_handler) == before[:2]
    assert found["session"] != os.getsid(0)
    assert found["handler"] == before[2]
