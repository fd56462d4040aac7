"""`raytrain doctor` on real nodes: all green where all is well, and each planted fault turns its own row red.

The head stays for the module, and has one faulty node beside it at a time, or none.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from raytrain.cluster.doctor.examine import Order, examine
from raytrain.cluster.doctor.facts import Row
from tests.cluster import namespaces
from tests.cluster.nodes import Nodes

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a machine whose nvidia-smi names a driver, and whose GPUs, if there are any, nobody sees."""
    directory = script(tmp_path_factory.mktemp("bin") / "nvidia-smi", "echo 550.54.15").parent
    return {"PATH": f"{directory}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def head(machine: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head with one CPU. Workers do not get the checkout on their path: the driver is connected from elsewhere."""
    ray.shutdown()
    arguments = {"num_cpus": 1, "include_dashboard": False, "env_vars": machine}
    cluster = Cluster(initialize_head=True, head_node_args=arguments)
    try:
        before = Path.cwd()
        os.chdir(tmp_path_factory.mktemp("elsewhere"))
        ray.init(address=cluster.address, log_to_driver=False)
        os.chdir(before)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


class Machines(Nodes):
    """Nodes whose names in the rows end as `add` says."""

    def __init__(self, cluster: Cluster, variables: dict[str, str]) -> None:
        super().__init__(cluster)
        self._variables = variables

    def join(self, variables: dict[str, str] | None = None, **more: Any) -> str:
        self.add(env_vars=self._variables | (variables or {}), **more)
        return f"({self.all[-1].node_id[:6]})"


@pytest.fixture
def nodes(head: Cluster, machine: dict[str, str]) -> Iterator[Machines]:
    """Those of one test."""
    try:
        yield Machines(head, machine)
    finally:
        for node in list(head.worker_nodes):
            head.remove_node(node)


def examined(storage: Path, **more: Any) -> dict[str, Row]:
    """The rows that are red, by name."""
    rows = examine(Order(storage=str(storage), **more))
    assert len(rows) == 13
    assert not list(storage.glob(".doctor-*"))
    return {row.name: row for row in rows if row.state == "red"}


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@ray.remote(num_cpus=1)
class Busy:
    def is_there(self) -> bool:
        return True


def test_two_healthy_nodes_are_all_green_as_a_command(head: Cluster, nodes: Machines, tmp_path: Path) -> None:
    nodes.join()
    command = [str(Path(sys.executable).with_name("raytrain")), "doctor", "--address", head.address, "--json"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--storage", "runs", "--workers", "1:8"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert time.monotonic() - began < 30
    said = json.loads(done.stdout)
    assert (done.returncode, said["green"], [row for row in said["rows"] if row["state"] == "red"]) == (0, True, [])
    found = {row["name"]: row["found"] for row in said["rows"] if row["state"] == "ok"}
    assert found["all-reduce"].startswith("2 nodes: gloo ")
    assert list(tmp_path.iterdir()) == [], "what it wrote is gone, and so is the directory that it made"


def test_gpus_that_are_not_there(nodes: Machines, tmp_path: Path) -> None:
    name = nodes.join(num_gpus=2)
    red = examined(tmp_path)
    assert set(red) == {"GPUs"}
    assert red["GPUs"].found.endswith(f"{name}: Ray offers 2, torch sees 0")


def test_another_version_of_a_package(nodes: Machines, tmp_path: Path) -> None:
    other = tmp_path / "site" / "numpy-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.0.1\n")
    name = nodes.join({"PYTHONPATH": str(other.parent)})
    red = examined(tmp_path)
    assert set(red) == {"packages"}
    assert f"{name}: numpy 0.0.1 (driver: " in red["packages"].found


def test_an_interface_that_is_not_there(nodes: Machines, tmp_path: Path) -> None:
    name = nodes.join({"GLOO_SOCKET_IFNAME": "nope0"})
    red = examined(tmp_path)
    assert set(red) == {"all-reduce"}
    assert red["all-reduce"].found.endswith(f"{name}: Unable to find address for: nope0")


def test_another_version_of_the_gpu_driver(nodes: Machines, tmp_path: Path) -> None:
    directory = script(tmp_path / "bin" / "nvidia-smi", "echo 535.104.05").parent
    name = nodes.join({"PATH": f"{directory}:{os.environ['PATH']}"})
    red = examined(tmp_path)
    assert set(red) == {"GPU drivers"}
    assert ": driver 550.54.15; " in red["GPU drivers"].found
    assert red["GPU drivers"].found.endswith(f"{name}: driver 535.104.05")


def test_three_faults_on_one_node_among_them_that_it_has_no_raytrain(nodes: Machines, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "raytrain").mkdir(parents=True)
    (site / "raytrain" / "__init__.py").write_text("raise ImportError('not here')\n")
    (site / "sitecustomize.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() - 100\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    try:
        name = nodes.join({"PYTHONPATH": str(site)})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    red = examined(tmp_path)
    assert set(red) == {"packages", "open files", "clocks"}
    assert f"{name}: no raytrain (driver: " in red["packages"].found
    assert red["open files"].found.endswith(f"{name}: limit 4,096")
    assert red["clocks"].found.endswith(f"{name}: 1 min 40 s behind the driver's")


def test_a_storage_that_is_a_file_no_free_cpu_and_a_disk_that_is_too_small(head: Cluster, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    assert set(examined(tmp_path / "runs")) == {"storage"}
    busy = Busy.remote()
    ray.get(busy.is_there.remote())
    until = time.monotonic() + 10
    while ray.available_resources().get("CPU") and time.monotonic() < until:
        time.sleep(0.1)
    red = examined(tmp_path)
    assert set(red) == {"free CPUs"}
    assert red["free CPUs"].found == "0 free; reading needs 1"
    ray.kill(busy)
    while not ray.available_resources().get("CPU") and time.monotonic() < until:
        time.sleep(0.1)
    assert set(examined(tmp_path, least_disk_bytes=2.0**60)) == {"disk"}


def test_a_node_that_leaves(nodes: Machines, tmp_path: Path) -> None:
    name = nodes.join(resources={"here": 1})
    busy = Busy.options(num_cpus=0, resources={"here": 1}).remote()  # or it would leave at once
    ray.get(busy.is_there.remote())
    nodes.drain(0, deadline_s=60)
    red = examined(tmp_path)
    ray.kill(busy)
    assert set(red) == {"nodes"}
    assert f"{name}: leaves in " in red["nodes"].found


@contextlib.contextmanager
def machine_with(prepare: str, head: Cluster, variables: dict[str, str], log: Path) -> Iterator[str]:
    """A node in namespaces of its own, after some shell commands there; its name in the rows."""
    known = {node["NodeID"] for node in ray.nodes()}
    start = f"ray start --block --address={head.address} --num-cpus=1 --object-store-memory=100000000"
    token = {"HOME": str(Path.home()), "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled")}  # as the head has it
    path = {"PATH": f"{variables['PATH']}:{namespaces.PATH}"}
    environment = namespaces.ENVIRONMENT | variables | path | token
    with log.open("w") as out:
        process = subprocess.Popen(
            [*namespaces.OWN, "sh", "-c", f"{prepare} && exec {start}"], env=environment, stdout=out, stderr=out
        )
    try:
        until = time.monotonic() + 20
        while not (new := {node["NodeID"] for node in ray.nodes() if node["Alive"]} - known):
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        yield f"({new.pop()[:6]})"
    finally:
        for started in psutil.Process(process.pid).children():  # the first process there
            started.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()  # and all that is in its namespaces
        process.wait()


@pytest.mark.skipif(not namespaces.can_be_made(), reason="namespaces cannot be made here")
def test_a_machine_with_little_shared_memory_that_does_not_share_the_storage(
    head: Cluster, machine: dict[str, str], tmp_path: Path
) -> None:
    storage = tmp_path / "runs"
    storage.mkdir()
    prepare = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -t tmpfs tmpfs {storage}"
    with machine_with(prepare, head, machine, tmp_path / "log") as name:
        red = examined(storage)
    assert set(red) == {"shared memory", "storage"}
    assert f"{name}: store of 95.4 MiB in /tmp/ray" in red["shared memory"].found
    assert f"{name}: cannot read what the driver wrote (FileNotFoundError" in red["storage"].found


def test_a_node_that_does_not_answer_and_one_that_dies_meanwhile(nodes: Machines, tmp_path: Path) -> None:
    """The last test, since Ray takes a while to notice."""
    stuck, dying = nodes.join(), nodes.join()
    raylet = nodes.all[0].all_processes["raylet"][0].process.pid
    os.kill(raylet, signal.SIGSTOP)

    def kill_when_it_has_answered(stage: str) -> None:
        if stage == "starting torch":
            nodes.kill(1)

    try:
        red = examined(tmp_path, limit_s=3.0, say=kill_when_it_has_answered)
    finally:
        os.kill(raylet, signal.SIGCONT)
    assert set(red) == {"nodes"}
    assert f"{stuck}: no answer in 6 s" in red["nodes"].found
    assert dying in red["nodes"].found
