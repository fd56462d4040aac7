"""How does a process reach its peers? The network interface with its node's address, and the TCPStore that they share.

Runs in workers and in the doctor's probes. The doctor ships it by value to nodes where raytrain may be missing, so it is a
file of its own that imports nothing of raytrain, and torch only where it is used.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import psutil

MAX_CONNECTING = 2048
"""Backlog of a store's socket: processes that connect at the same moment."""


def network_variables(host: str) -> dict[str, str]:
    """The network interface that has the address by which Ray knows this node.

    Gloo and NCCL choose one by the host's name otherwise, which may stand for an address that no peer reaches.
    """
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {}


def serve_store(host: str, timeout_s: float) -> Any:
    """A TCPStore that this process serves.

    It listens on a free port of `host` alone; left to itself, it would listen on all interfaces.

    Raises:
        OSError: `host` is no address of this node.
    """
    from torch._C._distributed_c10d import TCPStore

    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((host, 0), family=family, backlog=MAX_CONNECTING)
    port: int = listening.getsockname()[1]
    limit = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listening.detach())


def join_store(host: str, port: int, timeout_s: float) -> Any:
    """The TCPStore that another process serves.

    Raises:
        RuntimeError: it cannot be reached; torch's DistError is one.
    """
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
