"""Which TCP connections does a process group have, and how does another thread break them?

Gloo cannot be aborted, but a collective that waits raises once its connections are shut down. They are found among the
sockets that the process opened while the group was formed. Linux only: elsewhere none are found, and none are broken.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SOCKETS = "/proc/self/fd"


class Connections:
    """The connections of the group that is formed between the construction and `find`."""

    def __init__(self) -> None:
        self._before = _sockets()
        self._found: dict[int, int] = {}

    def find(self) -> None:
        """Notes the group's connections: those at the address on which the group listens.

        A connection that another socket of this process has accepted, perhaps one of Ray, is not the group's.
        """
        opened = {inode: fd for inode, fd in _sockets().items() if inode not in self._before}
        listening = dict(_listening(opened))
        hosts, others = {host for host, _ in listening.values()}, {port for _, (_, port) in _listening(self._before)}
        for inode, fd in opened.items():
            with _held(inode, fd) as found:
                if found is not None and inode not in listening:
                    host, port = found.getsockname()[:2]
                    if host in hosts and port not in others:
                        self._found[inode] = fd

    def shut_down(self) -> None:
        """Breaks the connections; may be called from any thread, also while the group is destroyed."""
        for inode, fd in self._found.items():
            with _held(inode, fd) as found, suppress(OSError):  # it may be closed already
                if found is not None:
                    found.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, int]:
    """The file descriptors of this process's sockets, by inode."""
    found = {}
    with suppress(FileNotFoundError):
        for name in os.listdir(SOCKETS):
            with suppress(OSError):  # closed meanwhile
                kind, _, inode = os.readlink(f"{SOCKETS}/{name}").partition(":")
                if kind == "socket":
                    found[int(inode.strip("[]"))] = int(name)
    return found


def _listening(sockets: dict[int, int]) -> Iterator[tuple[int, tuple[str, int]]]:
    """Inode and address of those that listen."""
    for inode, fd in sockets.items():
        with _held(inode, fd) as found:
            if found is not None and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield inode, found.getsockname()[:2]


@contextmanager
def _held(inode: int, fd: int) -> Iterator[socket.socket | None]:
    """A duplicate of a TCP socket for the time of the block; None if it is another kind, or the descriptor means another."""
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        copy = socket.socket(fileno=os.dup(fd))
        fcntl.fcntl(copy, fcntl.F_SETFL, flags)  # `socket.setdefaulttimeout` would make the original non-blocking, too
    except OSError:
        yield None
        return
    with copy:
        is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
        yield copy if is_tcp and os.fstat(copy.fileno()).st_ino == inode else None
