"""The Ray that the tests of a session share. Of a cluster the head stays; nodes come, die, and are announced to go away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from raytrain.cluster.fault_injection import drain, raylet_of
from tests.cluster.script import Story

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
        """The number of the node that a process belongs to."""
        own = raylet_of(pid)
        for number, node in enumerate(self.all):
            if own and any(raylet.process.pid == own.pid for raylet in node.all_processes.get("raylet", [])):
                return number
        raise AssertionError(f"process {pid} is on none of the nodes")


class SharedRay:
    """One at a time: a Ray of this process alone, which never grows, or the head of a cluster."""

    def __init__(self) -> None:
        self._is_small, self._cluster = False, None

    def small(self) -> str:
        """The address of a Ray of this process with two CPUs; workers of any driver find these tests."""
        if not self._is_small:
            self.close()
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
                ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
            self._is_small = True
        return str(ray.get_runtime_context().gcs_address)

    def head(self) -> Cluster:
        """A head without CPUs and without other nodes, and this process connected to it."""
        if self._cluster is None:
            self.close()
            arguments = {"num_cpus": 0, "include_dashboard": False, "_system_config": QUICK_HEALTH}
            self._cluster = Cluster(initialize_head=True, head_node_args=arguments)
            ray.init(address=self._cluster.address, log_to_driver=False)
        for node in list(self._cluster.worker_nodes):
            self._cluster.remove_node(node, allow_graceful=False)
        return self._cluster

    def close(self) -> None:
        ray.shutdown()
        if self._cluster is not None:
            self._cluster.shutdown()
        self._is_small, self._cluster = False, None
