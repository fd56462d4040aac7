"""Causes one fault of a chaos schedule: signals a process of this machine, or drains a node.

A process is signalled only if its command line says that it is a worker or a raylet, since process ids are reused. Drains go
to the cluster's control store (GCS), as those of `ray drain-node` do, so no driver has to be connected; Ray itself kills
nothing at the deadline.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from dataclasses import dataclass
from typing import Any

import psutil

from raytrain.cluster.chaos import Fault, NoVictimError, victim
from raytrain.errors import ResourceError
from raytrain.events.kinds import Member
from raytrain.events.view import RunView

WORKER = "RayTrainWorker"
SUSPENDED = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


@dataclass(frozen=True)
class FaultInjector:
    """Finds the victim of a fault and causes it.

    Args:
        cluster: address of the cluster, for drains; "" if not known.
        deadline_s: seconds from the start of a drain to the announced end of its node.
    """

    cluster: str = ""
    deadline_s: float = 30.0

    def inject(self, fault: Fault, view: RunView) -> str:
        """Causes a fault; returns the worker's name or the node's address that it hit.

        Raises:
            NoVictimError: it cannot be caused now.
        """
        if fault.names_a_node:
            self._hit_node(fault)
            return fault.target
        member = self._find_member(fault, view)
        if fault.kind == "drain":
            self._drain(self._node_id(member))
        elif fault.kind == "node":
            _kill_node(_raylet_of(member))
        else:
            _signal(fault.kind, member.pid)
        return member.worker

    def _find_member(self, fault: Fault, view: RunView) -> Member:
        present = [member for member in view.members if member.worker not in view.lost]
        found = victim(fault, present if fault.target else filter(_is_local, present))
        if found is None:
            raise NoVictimError("no such worker is training now")
        if fault.kind != "drain" and not _is_local(found):
            raise NoVictimError(f"{found.worker} is not a running worker process of this machine")
        return found

    def _node_id(self, member: Member) -> str:
        """From the local process if there is one: several nodes of one machine share an address."""
        return _raylet_of(member).node_id if _is_local(member) else self._only_node_at(member.node)

    def _hit_node(self, fault: Fault) -> None:
        if fault.kind == "drain":
            self._drain(self._only_node_at(fault.target))
            return
        found = [raylet for raylet in raylets() if raylet.address == fault.target]
        if not is_own_address(fault.target) or len(found) != 1:
            raise NoVictimError(f"{len(found)} nodes of this machine have that address, exactly one is needed")
        _kill_node(found[0])

    def _only_node_at(self, address: str) -> str:
        nodes = worker_nodes_at(self.cluster, address)
        if len(nodes) != 1:
            raise NoVictimError(f"{len(nodes)} nodes besides the head have that address, exactly one is needed")
        return nodes[0]

    def _drain(self, node_id: str) -> None:
        try:
            drain(self.cluster, node_id, self.deadline_s, "raytrain chaos")
        except ResourceError as error:
            raise NoVictimError(error.rule) from error


@dataclass(frozen=True)
class Raylet:
    """The raylet process of a node on this machine.

    Args:
        node_id: hexadecimal, as Ray shows it.
        address: of the node.
    """

    pid: int
    node_id: str
    address: str
    is_head: bool


def raylets() -> list[Raylet]:
    """All raylets of this machine."""
    return [found for process in psutil.process_iter() if (found := _as_raylet(process))]


def raylet_of(pid: int) -> Raylet | None:
    """The raylet of a worker process: its parent, or what a forked one has opened of it, see `elastic.fork_server`."""
    found: list[psutil.Process | None] = []
    with contextlib.suppress(psutil.Error, OSError):
        found.append(psutil.Process(pid).parent())
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(psutil.Error, OSError):  # it is closed meanwhile
                if process := re.fullmatch("/proc/([0-9]+)", os.readlink(entry.path)):
                    found.append(psutil.Process(int(process[1])))
    return next((raylet for process in found if process and (raylet := _as_raylet(process))), None)


def _as_raylet(process: psutil.Process) -> Raylet | None:
    try:
        words = process.cmdline()
    except psutil.Error:
        return None
    if not words or os.path.basename(words[0]) != "raylet":
        return None
    flags = dict(word.split("=", 1) for word in words if "=" in word)
    return Raylet(process.pid, flags.get("--node_id", ""), flags.get("--node_ip_address", ""), "--head" in words)


def is_running_worker(pid: int) -> bool:
    """Whether a process is a worker of Ray Train that is neither gone nor stopped."""
    try:
        process = psutil.Process(pid)
        return any(WORKER in word for word in process.cmdline()[:1]) and process.status() not in SUSPENDED
    except psutil.Error:
        return False


def is_own_address(address: str) -> bool:
    """Whether an address is one of this machine's: only those can be bound."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(target)
    except OSError:
        return False
    return True


def _is_local(member: Member) -> bool:
    return is_own_address(member.node) and is_running_worker(member.pid)


def _raylet_of(member: Member) -> Raylet:
    raylet = raylet_of(member.pid)
    if raylet is None:
        raise NoVictimError(f"the node of {member.worker} is not a process of this machine")
    return raylet


def _kill_node(raylet: Raylet) -> None:
    if raylet.is_head:
        raise NoVictimError("that node is the head: killing it ends the run and the cluster")
    _signal("kill", raylet.pid)


def _signal(kind: str, pid: int) -> None:
    try:
        (kill if kind == "kill" else stop)(pid)
    except psutil.Error as error:
        raise NoVictimError(str(error)) from error


def kill(pid: int) -> None:
    """Sends SIGKILL. Raises psutil.Error if the process is gone or belongs to another user."""
    psutil.Process(pid).kill()


def stop(pid: int) -> None:
    """Sends SIGSTOP, so that the process hangs. Raises as `kill` does."""
    psutil.Process(pid).suspend()


def worker_nodes_at(cluster: str, address: str) -> list[str]:
    """The ids of the nodes at an address that are alive and not the head.

    Args:
        cluster: address of the cluster, or "auto" for the one on this machine.
        address: of a node.
    """
    alive = 0  # GcsNodeInfo.GcsNodeState.ALIVE
    return [
        node_id.hex()
        for node_id, node in _gcs_client(cluster).get_all_node_info().items()
        if (node.node_manager_address, node.state, node.is_head_node) == (address, alive, False)
    ]


def drain(cluster: str, node_id: str, deadline_s: float, message: str) -> None:
    """Announces that a node will be preempted in `deadline_s` seconds.

    Raises:
        ResourceError: the cluster rejects the drain.
    """
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + deadline_s) * 1000)
    accepted, why = _gcs_client(cluster).drain_node(node_id, reason, message, deadline_ms)
    if not accepted:
        raise ResourceError(f"node {node_id}", "not drained", why, "see `ray list nodes`")


def _gcs_client(cluster: str) -> Any:
    import ray
    from ray._private import services

    return ray._raylet.GcsClient(address=services.canonicalize_bootstrap_address_or_die(cluster))
