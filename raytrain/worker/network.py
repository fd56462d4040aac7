"""How does a process find its peers? The interface that has its node's address, and the store through which they meet.

Runs in workers, and in the doctor's probes. Those carry it to nodes by value, where raytrain may be missing: nothing of
raytrain is imported here, and torch only when it is used.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import psutil

MAX_CONNECTING = 2048
"""Processes that connect to a store at once; more than that are asked to come again."""


def network_variables(host: str) -> dict[str, str]:
    """The network interface that has the address by which Ray knows this node.

    Gloo and NCCL choose one by the host's name otherwise, which may stand for an address that no peer reaches.
    """
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {}


def serve_store(host: str, limit_s: float) -> Any:
    """A TCPStore that this process serves.

    It listens on a free port of `host` alone; left to itself, it would listen on all interfaces.

    Raises:
        OSError: `host` is no address of this node.
    """
    from torch._C._distributed_c10d import TCPStore

    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((host, 0), family=family, backlog=MAX_CONNECTING)
    port: int = listening.getsockname()[1]
    limit = timedelta(seconds=limit_s)
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listening.detach())


def join_store(host: str, port: int, limit_s: float) -> Any:
    """The TCPStore that another process serves.

    Raises:
        RuntimeError: it cannot be reached; torch's DistError is one.
    """
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit_s))
