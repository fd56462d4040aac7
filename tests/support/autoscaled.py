"""Run in namespaces of its own by `tests.cluster.test_namespaces`: a cluster grows for a run, and shrinks after it.

The real autoscaler starts the nodes, on this machine. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray import cluster_utils

from raytrain.events.kinds import GenerationFormed
from tests.cluster.script import Story, run, trained

HEAD = "ray.head.default"  # the provider knows it by this name
PROVIDER = {
    "type": "external",
    "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
    "use_node_id_as_ip": True,
    "disable_node_updaters": True,
    "disable_launch_config_check": True,
    "launch_multiple": True,
    "head_node_id": cluster_utils.FAKE_HEAD_NODE_ID,
}
COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
EMPTY = [*(f"{name}_commands" for name in COMMANDS), "cluster_synced_files", "rsync_exclude", "rsync_filter"]
NODE = {"resources": {"CPU": 1, "object_store_memory": 80_000_000}, "node_config": {}, "min_workers": 0, "max_workers": 3}


class Autoscaled(cluster_utils.AutoscalingCluster):
    """Spells its configuration out: the file from which Ray would take it is not in the wheel of 2.60."""

    def _generate_config(self, head_resources: Any, worker_node_types: Any, autoscaler_v2: bool, **more: Any) -> Any:
        head = {"resources": head_resources, "node_config": {}, "max_workers": 0}
        return {
            **{name: [] for name in EMPTY},
            **{name: {} for name in ("auth", "docker", "file_mounts")},
            "cluster_name": "fake",
            "provider": PROVIDER,
            "file_mounts_sync_continuously": False,
            "head_node_type": HEAD,
            "available_node_types": {**worker_node_types, HEAD: head},
            **more,
        }


def num_nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def main(storage: Path) -> None:
    cluster = Autoscaled(
        head_resources={"CPU": 0, "object_store_memory": 80_000_000},
        worker_node_types={"spot": NODE},
        autoscaler_v2=True,
        idle_timeout_minutes=0.1,
        max_workers=3,
        upscaling_speed=5,
    )
    cluster.start()
    ray.init("auto", log_to_driver=False)
    gate = storage / "gate"
    gate.touch()
    before = num_nodes()
    more = {"workers": (1, 3), "logical_workers": 4, "cpus_per_worker": 1.0, "epochs": 8}
    _, events = run(storage, Story(gate, trained(3)), gate, **more)
    during, ended = num_nodes(), time.monotonic()
    while num_nodes() > 1 and time.monotonic() < ended + 60:
        time.sleep(0.2)
    generations = [len(event.members) for event in events if isinstance(event, GenerationFormed)]
    print(json.dumps({"before": before, "during": during, "after": num_nodes(), "generations": generations}))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
