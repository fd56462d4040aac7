"""Announces that a node of Ray goes away, as a cloud does that takes a spot machine back.

Ray itself ends nothing at the deadline. Talks to the cluster's control store (GCS), so no driver has to be connected;
`ray drain-node` does the same.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray._private import services
from ray.core.generated import autoscaler_pb2

from raytrain.errors import ResourceError


def workers_nodes_at(cluster: str, address: str) -> list[str]:
    """The ids of the living nodes at an address, but for the head.

    Args:
        cluster: address of the cluster, "auto" for the one on this machine.
        address: of a node.
    """
    alive = 0  # GcsNodeInfo.GcsNodeState.ALIVE
    nodes = _client(cluster).get_all_node_info().items()
    return [
        node_id.hex()
        for node_id, node in nodes
        if (node.node_manager_address, node.state, node.is_head_node) == (address, alive, False)
    ]


def drain(cluster: str, node_id: str, deadline_s: float, message: str) -> None:
    """Announces that a node will be gone in `deadline_s` seconds.

    Raises:
        ResourceError: the cluster refused.
    """
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + deadline_s) * 1000)
    accepted, why = _client(cluster).drain_node(node_id, reason, message, deadline_ms)
    if not accepted:
        raise ResourceError(f"node {node_id}", "not drained", why, "see `ray list nodes`")


def _client(cluster: str) -> Any:
    return ray._raylet.GcsClient(address=services.canonicalize_bootstrap_address_or_die(cluster))
