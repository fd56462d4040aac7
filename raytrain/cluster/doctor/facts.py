"""What is known of a cluster and its nodes before a run: values that `examine` gathers and `verdicts` judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "red", "-"]


@dataclass(frozen=True)
class Row:
    """One line of the answer.

    Args:
        name: of what was checked.
        state: "-" where there is nothing to check, which is no fault.
        found: what there is.
        fix: what to do about it, if it is red.
    """

    name: str
    state: State
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Node:
    """A living node, as the cluster knows it.

    Args:
        name: for people: its address, with the beginning of its id where nodes share one.
        node_id: hexadecimal.
        gpus: that it offers.
        object_store_bytes: size of its object store.
        leaves_in_s: seconds until it is gone, if it is announced to go; 0 where no time was told.
    """

    name: str
    node_id: str
    address: str
    gpus: float
    object_store_bytes: int
    leaves_in_s: float | None = None


@dataclass(frozen=True)
class Disk:
    """Space of a filesystem, for a user without privileges.

    Args:
        path: of a directory in it.
    """

    path: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Facts:
    """What a node says of itself.

    Args:
        hostname: its own name for itself.
        versions: of python and of the packages that a run needs; "" for one that is missing.
        raytrain_files: digest of raytrain's source files; "" where it cannot be imported.
        gpu_drivers: versions that nvidia-smi tells, one per GPU.
        interface: the network interface that gloo is told to use; "" if it goes by the hostname.
        interface_address: that it stands for; "" if there is no such interface.
        open_files: soft limit of a process.
        temp: where Ray keeps its logs and spilled objects.
        object_store: the directory of Ray's object store; "" if not known.
        shm_bytes: size of /dev/shm; 0 if there is none.
    """

    hostname: str
    versions: Mapping[str, str]
    raytrain_files: str
    gpu_drivers: tuple[str, ...]
    interface: str
    interface_address: str
    open_files: int
    temp: Disk
    object_store: str
    shm_bytes: int


@dataclass(frozen=True)
class Torch:
    """What torch says on a node.

    Args:
        gpus: that it sees.
        nccl: its version; "" if it has none.
        error: why it cannot be imported; "" if it can.
    """

    gpus: int
    nccl: str
    error: str


@dataclass(frozen=True)
class Ring:
    """A node's part in an all-reduce between all nodes.

    Args:
        phase: how far it got.
        error: why it went no further; "" if it did, or if it waited until its limit.
        done: whether it got all sums, and they were right.
        latency_s: of a small tensor.
        bytes_per_s: bus bandwidth with a big one.
    """

    phase: str
    error: str = ""
    done: bool = False
    latency_s: float = 0.0
    bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Clock:
    """How much a node's clock is ahead of the driver's, and by how much that may be wrong."""

    offset_s: float
    uncertainty_s: float
