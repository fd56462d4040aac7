"""`raytrain doctor` on real nodes: all green where all is well, and each planted fault turns its own row red.

Three examinations: a healthy cluster; all faults that a node reports, planted together; nodes that do not answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from raytrain.cli.app import run
from raytrain.cluster.doctor.examine import DoctorConfig, examine
from raytrain.cluster.doctor.verdicts import Row
from tests.cluster import namespaces
from tests.cluster.nodes import Nodes

pytestmark = pytest.mark.timeout(120)


class Machines(Nodes):
    """Nodes of a machine whose nvidia-smi names a driver, and whose GPUs, if there are any, nobody sees."""

    def __init__(self, cluster: Cluster, variables: dict[str, str]) -> None:
        super().__init__(cluster)
        self.variables = variables

    def join(self, variables: dict[str, str] | None = None, **more: Any) -> str:
        """Adds a node; returns how its name ends in the rows."""
        self.add(env_vars=self.variables | (variables or {}), **more)
        return f"({self.all[-1].node_id[:6]})"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """A head with one CPU and a healthy node. Workers have no checkout on their path: the driver connects from elsewhere."""
    bin_dir = script(tmp_path_factory.mktemp("bin") / "nvidia-smi", "echo 550.54.15").parent
    machine = {"PATH": f"{bin_dir}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    ray.shutdown()
    arguments = {"num_cpus": 1, "include_dashboard": False, "env_vars": machine}
    cluster = Cluster(initialize_head=True, head_node_args=arguments)
    try:
        before = Path.cwd()
        os.chdir(tmp_path_factory.mktemp("elsewhere"))
        ray.init(address=cluster.address, log_to_driver=False)
        os.chdir(before)
        nodes = Machines(cluster, machine)
        nodes.join(resources={"first": 1})
        yield nodes
    finally:
        ray.shutdown()
        cluster.shutdown()


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def red_rows(storage: Path, **more: Any) -> dict[str, str]:
    """What was found in each red row, without the address that all nodes share."""
    rows: list[Row] = examine(DoctorConfig(storage=str(storage), **more))
    assert len(rows) == 13
    assert not list(storage.glob(".doctor-*"))
    address = f"{ray.util.get_node_ip_address()} ("
    return {row.name: row.found.replace(address, "(") for row in rows if row.state == "red"}


def wait_until(condition: Callable[[], Any], log: Path | None = None, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, log and log.read_text()
        time.sleep(0.05)


@ray.remote(num_cpus=1)
class Busy:
    def is_there(self) -> bool:
        return True


@contextlib.contextmanager
def busy_cpus() -> Iterator[None]:
    """All CPUs are reserved: one on the healthy node, which can be drained without leaving at once, and the head's."""
    actors = []
    for resources in ({"first": 1}, {}):
        actors.append(Busy.options(resources=resources).remote())
        ray.get(actors[-1].is_there.remote())
    wait_until(lambda: not ray.available_resources().get("CPU"))
    try:
        yield
    finally:
        for actor in actors:
            ray.kill(actor)


@contextlib.contextmanager
def faulty_host(storage: Path, nodes: Machines, tmp: Path) -> Iterator[str]:
    """A node without raytrain and with a wrong interface, in namespaces with little shared memory and its own storage."""
    (tmp / "other" / "raytrain").mkdir(parents=True)
    (tmp / "other" / "raytrain" / "__init__.py").write_text("raise ImportError('not here')\n")
    known = {node["NodeID"] for node in ray.nodes()}
    start = f"exec ray start --block --address={nodes.cluster.address} --num-cpus=0 --object-store-memory=100000000"
    if namespaces.can_be_made():
        start = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -t tmpfs tmpfs {storage} && {start}"
    variables = {"GLOO_SOCKET_IFNAME": "nope0", "PYTHONPATH": str(tmp / "other"), "HOME": str(Path.home())}
    variables |= {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled"), "CUDA_VISIBLE_DEVICES": ""}
    variables |= {"PATH": f"{nodes.variables['PATH']}:{namespaces.PATH}"}
    command = [*(namespaces.OWN if namespaces.can_be_made() else []), "sh", "-c", start]
    with (tmp / "log").open("w") as log:
        process = subprocess.Popen(command, env=namespaces.ENVIRONMENT | variables, stdout=log, stderr=log)
    try:
        new: set[str] = set()
        wait_until(lambda: new.update({node["NodeID"] for node in ray.nodes() if node["Alive"]} - known) or new, tmp / "log")
        yield f"({new.pop()[:6]})"
    finally:
        started = psutil.Process(process.pid).children(recursive=True)
        for child in started[:1]:
            child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()


def join_faulty(nodes: Machines, tmp: Path) -> str:
    """A node with another numpy and GPU driver, GPUs that do not exist, few open files, and a clock that is late."""
    driver = script(tmp / "bin" / "nvidia-smi", "echo 535.104.05").parent
    other = tmp / "site" / "numpy-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.0.1\n")
    (tmp / "site" / "sitecustomize.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() - 100\n")
    variables = {"PYTHONPATH": str(tmp / "site"), "PATH": f"{driver}:{os.environ['PATH']}"}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    try:
        return nodes.join(variables, num_cpus=0, num_gpus=2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_two_healthy_nodes_are_all_green_as_a_command(
    nodes: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nodes.cluster.address)
    monkeypatch.chdir(tmp_path)
    code = run(["doctor", "--json", "--storage", "runs", "--workers", "1:8"])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["green"], [row for row in report["rows"] if row["state"] == "red"]) == (0, True, [])
    found = {row["name"]: row["found"] for row in report["rows"] if row["state"] == "ok"}
    assert found["all-reduce"].startswith("2 nodes: gloo ")
    assert list(tmp_path.iterdir()) == [], "the storage directory was new, and is removed"


def test_each_fault_turns_its_own_row_red_and_names_its_node(nodes: Machines, tmp_path: Path) -> None:
    storage = tmp_path / "runs"
    storage.mkdir()
    drained, faulty = f"({nodes.all[0].node_id[:6]})", join_faulty(nodes, tmp_path)
    with busy_cpus(), faulty_host(storage, nodes, tmp_path) as host:
        nodes.drain(0, deadline_s=60)
        red = red_rows(storage)
    wait_until(lambda: ray.available_resources().get("CPU"))
    exact = {
        "GPUs": f"{faulty}: Ray offers 2, torch sees 0",
        "open files": f"{faulty}: limit 4,096",
        "clocks": f"{faulty}: 1 min 40 s behind the driver's",
        "free CPUs": "0 free; reading needs 1",
        "all-reduce": f"gloo: {host}: Unable to find address for: nope0",
    }
    parts = {
        "nodes": [f"{drained}: draining, terminates in "],
        "GPU drivers": [": driver 550.54.15; ", f"; {faulty}: driver 535.104.05"],
        "packages": [f"{host}: no raytrain (driver: ", f"{faulty}: numpy 0.0.1 (driver: "],
    }
    if namespaces.can_be_made():
        parts["shared memory"] = [f"{host}: store of 95.4 MiB in /tmp/ray"]
        parts["storage"] = [f"{storage}: {host}: cannot read what the driver wrote (FileNotFoundError"]
    assert {name: red.get(name) for name in exact} == exact
    assert set(red) == {*exact, *parts}
    assert [text for name, texts in parts.items() for text in texts if text not in red[name]] == [], red


def test_nodes_that_do_not_answer_or_die_and_a_storage_and_disk_that_fail(nodes: Machines, tmp_path: Path) -> None:
    """The last test, since Ray takes a while to notice."""
    stuck, dying = f"({nodes.all[1].node_id[:6]})", nodes.join()
    raylet = nodes.all[1].all_processes["raylet"][0].process.pid
    os.kill(raylet, signal.SIGSTOP)
    (tmp_path / "runs").write_text("")

    def kill_when_it_has_answered(stage: str) -> None:
        if stage == "starting torch":
            nodes.kill(2)

    try:
        red = red_rows(tmp_path / "runs", timeout_s=3.0, min_disk_bytes=2.0**60, on_progress=kill_when_it_has_answered)
    finally:
        os.kill(raylet, signal.SIGCONT)
    assert set(red) == {"nodes", "storage", "disk"}
    assert re.search(rf"{re.escape(stuck)}.*: no answer in 6 s", red["nodes"]), red["nodes"]
    assert dying in red["nodes"]
    assert "runs: driver: cannot write (" in red["storage"]
