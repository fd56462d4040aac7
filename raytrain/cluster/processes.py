"""Which processes of this machine are workers and nodes of Ray? Read from /proc; and the signals that they are sent.

Nothing is signalled that does not say itself, in its command line, what it is: process numbers are used again.
"""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

WORKER = "RayTrainWorker"


@dataclass(frozen=True)
class Raylet:
    """The process of a node of Ray on this machine.

    Args:
        node_id: hexadecimal, as Ray shows it.
        address: of the node.
        is_head: whether the cluster ends with it.
    """

    pid: int
    node_id: str
    address: str
    is_head: bool


def is_own_address(address: str) -> bool:
    """Whether an address is one of this machine's: only those can be bound."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(target)
    except OSError:
        return False
    return True


class Processes:
    """The processes of this machine.

    Args:
        proc: the directory where the kernel shows them.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def is_running_worker(self, pid: int) -> bool:
        """Whether a process is a worker of Ray Train that is neither gone nor stopped."""
        title = self._command(pid)[:1]
        return bool(title) and WORKER in title[0] and self._status(pid)[0] not in ("T", "Z", "")

    def raylet_of(self, pid: int) -> Raylet | None:
        """The node that a worker's process belongs to: the raylet started it."""
        return self._raylet(self._status(pid)[1])

    def raylets(self) -> list[Raylet]:
        """All nodes of Ray on this machine."""
        found = (self._raylet(int(path.name)) for path in self._proc.iterdir() if path.name.isdigit())
        return [raylet for raylet in found if raylet is not None]

    def _raylet(self, pid: int) -> Raylet | None:
        words = self._command(pid)
        if not words or os.path.basename(words[0]) != "raylet":
            return None
        flags = dict(word.split("=", 1) for word in words if "=" in word)
        return Raylet(pid, flags.get("--node_id", ""), flags.get("--node_ip_address", ""), "--head" in words)

    def _command(self, pid: int) -> list[str]:
        try:
            text = (self._proc / str(pid) / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            return []
        return [word for word in text.split("\0") if word]

    def _status(self, pid: int) -> tuple[str, int]:
        """Its state's letter, and the process that started it; see proc_pid_stat(5)."""
        try:
            state, parent = (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            return "", 0
        return state, int(parent)


def kill(pid: int) -> None:
    """Raises ProcessLookupError if it is gone, PermissionError if it is somebody else's."""
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    """As `kill`, but the process only stops, as if it hung."""
    os.kill(pid, signal.SIGSTOP)
