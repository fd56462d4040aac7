"""A cluster of several nodes on this machine, for the tests of a module: nodes come, die, and are announced to go away."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from raytrain.cluster.draining import drain
from raytrain.events.kinds import GenerationFormed, StateRestored
from tests.cluster.script import Story, run

QUICK_HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


class Nodes:
    """Worker nodes of one cluster, by the order in which they came."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.all = cluster, []

    def add(self, num_cpus: float = 1, **more: Any) -> None:
        self.all.append(self.cluster.add_node(num_cpus=num_cpus, **more))

    def kill(self, number: int) -> None:
        self.cluster.remove_node(self.all[number], allow_graceful=False)

    def drain(self, number: int, deadline_s: float = 30) -> None:
        drain(self.cluster.address, self.all[number].node_id, deadline_s, "test")

    def of_rank(self, story: Story, rank: int) -> int:
        """The number of the node on which a rank trains."""
        return self.of_pid(story.members[rank].pid)

    def of_pid(self, pid: int) -> int:
        """The number of the node whose raylet started a process."""
        with open(f"/proc/{pid}/stat") as stat:
            parent = int(stat.read().rpartition(")")[2].split()[1])
        for number, node in enumerate(self.all):
            if any(raylet.process.pid == parent for raylet in node.all_processes.get("raylet", [])):
                return number
        raise AssertionError(f"process {pid} is on none of the nodes")


@contextlib.contextmanager
def head_alone() -> Iterator[Cluster]:
    """A cluster with a head that has no CPUs, and this process connected to it."""
    ray.shutdown()
    arguments = {"num_cpus": 0, "include_dashboard": False, "_system_config": QUICK_HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=arguments)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextlib.contextmanager
def nodes_of(head: Cluster) -> Iterator[Nodes]:
    """Those of one test; they are gone after it."""
    try:
        yield Nodes(head)
    finally:
        for node in list(head.worker_nodes):
            head.remove_node(node, allow_graceful=False)


def play(
    tmp_path: Path, gate: Path, parts: list[Callable[[Story], bool]], **more: Any
) -> tuple[list[Any], list[GenerationFormed], Story]:
    """The events of a run, its generations, and the story."""
    story = Story(gate, *parts)
    _, events = run(tmp_path, story, gate, **{"cpus_per_worker": 1.0, **more})
    return events, [event for event in events if isinstance(event, GenerationFormed)], story


def restored(events: list[Any]) -> list[int]:
    return [event.step for event in events if isinstance(event, StateRestored)]


def later(seconds: float) -> Callable[[Story], bool]:
    """Until so many seconds have passed since the part before."""
    return lambda story: time.time() > story.times[-1] + seconds
