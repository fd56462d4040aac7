"""Two healthy nodes, as values."""

from __future__ import annotations

from typing import Any

from raytrain.cluster.doctor.facts import Disk, Facts, Node, Ring, Torch
from raytrain.cluster.doctor.host import PACKAGES

GIB = 2**30
A, B = "10.0.0.1", "10.0.0.2"
VERSIONS = {"python": "3.11.7", "raytrain": "0.1.0", **dict.fromkeys(PACKAGES, "1.0")}
VERSIONS |= {"ray": "2.60.0", "torch": "2.13.0+cu128"}


def node(name: str = A, **more: Any) -> Node:
    values = {"node_id": "3f" * 28, "address": name, "gpus": 0.0, "object_store_bytes": 2 * GIB}
    return Node(**{"name": name, **values, **more})


def facts(**more: Any) -> Facts:
    values: dict[str, Any] = {
        "hostname": "node1",
        "versions": VERSIONS,
        "raytrain_files": "abc",
        "gpu_drivers": (),
        "interface": "eth0",
        "interface_address": A,
        "open_files": 65536,
        "temp": Disk("/tmp/ray/session", 50 * GIB, 100 * GIB),
        "object_store": "/dev/shm",
        "shm_bytes": 4 * GIB,
    }
    return Facts(**{**values, **more})


def torch(gpus: int = 0, nccl: str = "", error: str = "") -> Torch:
    return Torch(gpus, nccl, error)


def ring(**more: Any) -> Ring:
    values: dict[str, Any] = {"phase": "done", "done": True, "latency_s": 0.00021, "bytes_per_s": 1.1 * GIB}
    return Ring(**{**values, **more})
