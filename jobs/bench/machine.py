"""A cluster on this machine for a benchmark: nodes that come, are announced to go, and are killed.

Runs in the benchmark's own process, in its main thread; a side connects to it by its address. Says also how long each node
was there, which is what a cloud would bill.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from ray.cluster_utils import Cluster

from raytrain.cluster.fault_injection import drain

QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""A lost node is noticed after 1.5 s instead of 13 s."""


class Machine:
    """A cluster on this machine, and how long each of its nodes was there."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": QUICK_TO_NOTICE}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        self._nodes = {}
        self._spans = {}

    def add(self) -> None:
        node = self._cluster.add_node(num_cpus=1)
        self._nodes[raylet_of(node)] = node
        self._spans[node.node_id] = (time.time(), float("inf"))

    def announce(self, raylet: int, deadline_s: float) -> None:
        drain(self.address, self._nodes[raylet].node_id, deadline_s, "a benchmark")

    def take(self, raylet: int) -> None:
        """Kills a node with its processes, as a machine that is switched off."""
        node = self._nodes.pop(raylet)
        processes = children_of(raylet)
        self._cluster.remove_node(node, allow_graceful=False)
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._spans[node.node_id] = (self._spans[node.node_id][0], time.time())

    def seconds(self, start: float, stop: float) -> float:
        return sum(max(0.0, min(stop, ended) - max(start, began)) for began, ended in self._spans.values())

    def close(self) -> None:
        self._cluster.shutdown()


def raylet_of(node) -> int:
    return node.all_processes["raylet"][0].process.pid


def parent_of(pid: int) -> int:
    """The process that started a process, for a worker the raylet of its node; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def children_of(pid: int) -> list[int]:
    everyone = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [child for child in everyone if parent_of(child) == pid]
