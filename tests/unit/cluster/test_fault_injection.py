"""Signals reach running workers and raylets of this machine and nothing else, shown on real processes with their names."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from raytrain.cluster import fault_injection
from raytrain.cluster.chaos import Fault, NoVictimError
from raytrain.cluster.fault_injection import FaultInjector, is_own_address, is_running_worker
from raytrain.errors import ResourceError
from raytrain.events import kinds
from raytrain.events.view import RunView, fold
from tests.unit.cluster.test_chaos import formed
from tests.unit.events.test_view import started

NODE, HEAD = "127.31.41.1", "127.31.41.2"
CHILDREN = {"worker": "ray::RayTrainWorker", "idle": "ray::IDLE", "editor": "vim"}
SCRIPT = """for name; do case $name in ray*|vim)
(exec -a "$name" tail -q -F RayTrainWorker >/dev/null 2>&1) & echo $!;; esac; done; wait"""


class Node:
    """A process that looks like a raylet, and its children by their keys in CHILDREN."""

    def __init__(self, address: str, *flags: str) -> None:
        words = ["/x/raylet/raylet", "-c", SCRIPT, "sh", *CHILDREN.values(), f"--node_id=id-{address}", *flags]
        words.append(f"--node_ip_address={address}")
        self.process = subprocess.Popen(words, executable="/bin/bash", stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.pids = {key: int(self.process.stdout.readline()) for key in CHILDREN}
        for key, name in CHILDREN.items():
            while psutil.Process(self.pids[key]).cmdline()[:1] != [name]:
                pass

    def end(self) -> None:
        for pid in self.pids.values():
            if psutil.pid_exists(pid):
                psutil.Process(pid).kill()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    """A worker node and a head."""
    both = Node(NODE), Node(HEAD, "--head")
    yield both
    for node in both:
        node.end()


def view(*pids: int, node: str = "127.0.0.1") -> RunView:
    return fold([started(), formed(*pids, node=node)])


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_workers_and_nodes_of_this_machine_are_signalled(nodes: tuple[Node, Node]) -> None:
    first, second = (node.pids["worker"] for node in nodes)
    injector, training = FaultInjector(), view(first, second)
    assert injector.inject(Fault("stop", "rank1"), training) == f"w{second}"
    while psutil.Process(second).status() != psutil.STATUS_STOPPED:
        pass
    assert injector.inject(Fault("kill", draw=0.9), training) == f"w{first}", "a stopped worker is no random victim"
    while is_alive(first):
        pass
    with pytest.raises(NoVictimError, match="no such worker"):
        injector.inject(Fault("kill"), training)
    with pytest.raises(NoVictimError, match="not a running worker"):
        injector.inject(Fault("kill", "rank1"), training)


@pytest.mark.parametrize("target", ["rank0", NODE])
def test_a_node_is_killed_by_its_worker_or_its_address(target: str, nodes: tuple[Node, Node]) -> None:
    pid = nodes[0].pids["worker"]
    assert FaultInjector().inject(Fault("node", target), view(pid)) == (f"w{pid}" if target == "rank0" else NODE)
    assert nodes[0].process.wait(10) == -9


@pytest.mark.parametrize(
    ("fault", "of", "address", "why"),
    [
        (Fault("kill", "w9"), "worker", "127.0.0.1", "no such worker"),
        (Fault("kill", "rank0"), "idle", "127.0.0.1", "is not a running worker process"),
        (Fault("kill", "rank0"), "editor", "127.0.0.1", "is not a running worker process"),
        (Fault("kill", "rank0"), "worker", "192.0.2.77", "is not a running worker process"),
        (Fault("kill"), "worker", "192.0.2.77", "no such worker"),
        (Fault("node", "rank0"), "worker", "127.0.0.1", "is the head"),
        (Fault("node", HEAD), "worker", "127.0.0.1", "is the head"),
        (Fault("node", "127.31.41.3"), "worker", "127.0.0.1", "0 nodes of this machine"),
    ],
)
def test_nothing_else_is_signalled(fault: Fault, of: str, address: str, why: str, nodes: tuple[Node, Node]) -> None:
    with pytest.raises(NoVictimError, match=why):
        FaultInjector().inject(fault, view(nodes[1].pids[of], node=address))
    assert all(is_alive(pid) for node in nodes for pid in [*node.pids.values(), node.process.pid])


def test_a_lost_worker_is_not_a_victim(nodes: tuple[Node, Node]) -> None:
    first, second = (node.pids["worker"] for node in nodes)
    lost = kinds.WorkerLost(worker=f"w{first}", node="127.0.0.1", pid=first, reason="gone")
    assert FaultInjector().inject(Fault("stop", draw=0.0), fold([started(), formed(first, second), lost])) == f"w{second}"


def test_processes_that_are_gone_or_not_ours_are_no_workers() -> None:
    child = subprocess.Popen(["ray::RayTrainWorker"], executable="/bin/true")
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert not is_running_worker(child.pid)
    child.wait()
    assert not is_running_worker(child.pid)
    assert not is_running_worker(0)
    assert fault_injection.raylet_of(child.pid) is None


def test_a_forked_worker_shows_its_raylet_by_what_it_has_opened(nodes: tuple[Node, Node]) -> None:
    _, head = nodes
    mark = os.open(f"/proc/{head.process.pid}", os.O_RDONLY)
    with subprocess.Popen(["sleep", "60"], stdin=mark) as forked:
        os.close(mark)
        found = fault_injection.raylet_of(forked.pid)
        forked.kill()
    assert found is not None
    assert (found.pid, found.is_head) == (head.process.pid, True)


def test_an_address_is_own_if_it_can_be_bound() -> None:
    addresses = ("127.0.0.1", "192.0.2.77", "no such host.invalid")  # RFC 5737: the second belongs to nobody
    assert [is_own_address(address) for address in addresses] == [True, False, False]


def test_a_drain_finds_its_node_by_worker_or_address(nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    drained: list[tuple[str, str, float]] = []
    far = {"192.0.2.77": ["far"], "192.0.2.79": ["far", "away"]}

    def drain(cluster: str, node_id: str, deadline_s: float, message: str) -> None:
        drained.append((cluster, node_id, deadline_s))
        if len(drained) > 3:
            raise ResourceError("node", "not drained", "refused by Ray", "see")

    monkeypatch.setattr(fault_injection, "drain", drain)
    monkeypatch.setattr(fault_injection, "worker_nodes_at", lambda cluster, address: far.get(address, []))
    injector, local = FaultInjector("cluster:1", 7.0), view(nodes[0].pids["worker"])
    injector.inject(Fault("drain", "rank0"), local)
    injector.inject(Fault("drain", "rank0"), view(30, node="192.0.2.77"))
    assert injector.inject(Fault("drain", "192.0.2.77"), local) == "192.0.2.77"
    assert drained == [("cluster:1", node, 7.0) for node in (f"id-{NODE}", "far", "far")]
    for address, why in (("192.0.2.78", "0 nodes besides"), ("192.0.2.79", "2 nodes besides"), ("192.0.2.77", "refused")):
        with pytest.raises(NoVictimError, match=why):
            injector.inject(Fault("drain", address), local)
