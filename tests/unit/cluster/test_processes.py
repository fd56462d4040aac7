"""Processes are known by what /proc says of them; nothing is taken for a worker because of its number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain.cluster.processes import Processes, Raylet, is_own_address, kill, stop


def show(proc: Path, pid: int, command: list[str], state: str = "S", parent: int = 1) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "cmdline").write_bytes("".join(f"{word}\0" for word in command).encode())
    (proc / str(pid) / "stat").write_text(f"{pid} (a (strange) name) {state} {parent} 0 0")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    flags = ["--node_id=abc", "--node_ip_address=10.0.0.1", "--python_worker_command=python --node-ip-address=x"]
    show(tmp_path, 10, ["/ray/core/src/ray/raylet/raylet", *flags])
    show(tmp_path, 11, ["/ray/core/src/ray/raylet/raylet", "--node_id=def", "--node_ip_address=10.0.0.1", "--head"])
    show(tmp_path, 20, ["ray::RayTrainWorker", "", ""], parent=10)
    show(tmp_path, 21, ["ray::RayTrainWorker.run"], state="T", parent=10)
    show(tmp_path, 22, ["ray::IDLE"], parent=10)
    show(tmp_path, 23, ["vim", "notes on RayTrainWorker"])
    show(tmp_path, 24, [], state="Z")
    (tmp_path / "meminfo").touch()
    return tmp_path


def test_only_a_running_worker_is_one(proc: Path) -> None:
    there = Processes(proc)
    assert [pid for pid in (*range(10, 30), 0) if there.is_running_worker(pid)] == [20]


def test_the_node_of_a_worker_is_the_raylet_that_started_it(proc: Path) -> None:
    there = Processes(proc)
    assert there.raylet_of(20) == Raylet(10, "abc", "10.0.0.1", is_head=False)
    assert there.raylet_of(23) is None
    assert sorted(raylet.node_id for raylet in there.raylets() if not raylet.is_head) == ["abc"]
    assert len(there.raylets()) == 2


def test_an_address_is_ours_or_not() -> None:
    assert is_own_address("127.0.0.1")
    assert not is_own_address("192.0.2.77")  # RFC 5737: belongs to nobody
    assert not is_own_address("no such host.invalid")


def test_signals_reach_a_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stop(child.pid)
    assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
    kill(child.pid)
    assert child.wait(10) == -signal.SIGKILL
    child.communicate()
