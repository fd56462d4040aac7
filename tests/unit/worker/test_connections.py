"""A collective that waits for a peer is broken by another thread, with all connections but those of others left alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from raytrain.rendezvous.state import Generation, JoinRequest
from raytrain.worker.connections import Connections
from raytrain.worker.failures import PeerLost
from raytrain.worker.group import process_group, serve_store

PEER = """
import sys, time, torch
from raytrain.worker.group import process_group, serve_store
from tests.unit.worker.test_connections import generation

with process_group(generation(int(sys.argv[1])), "w1", serve_store("127.0.0.1"), torch.device("cpu"), 60.0):
    time.sleep(60)  # it lives, and does not come
"""


def generation(port: int) -> Generation:
    return Generation(1, (JoinRequest("w0", 0, ("127.0.0.1", port)), JoinRequest("w1", 0, ("127.0.0.1", 1))), "start")


def test_r6_a_gloo_collective_that_waits_is_broken_from_another_thread() -> None:
    store = serve_store("127.0.0.1")

    def wait_in_vain() -> None:
        with process_group(generation(store.port), "w0", store, torch.device("cpu"), 60.0) as group:
            threading.Timer(0.5, group.abort).start()
            dist.all_reduce(torch.zeros(1))

    command = [sys.executable, "-c", PEER, str(store.port)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[3]) as peer:
        with pytest.raises(PeerLost):
            wait_in_vain()
        assert peer.poll() is None, "it was not the peer who ended"
        peer.kill()


def test_connections_of_others_are_left_alone() -> None:
    """Ray accepts and opens connections at any time, on the same address."""
    ray = socket.create_server(("127.0.0.1", 0))
    kept = [socket.create_connection(ray.getsockname())]
    connections = Connections()
    kept += [socket.create_connection(ray.getsockname()), ray.accept()[0], ray.accept()[0]]
    connections.find()
    assert connections._found == {}, "nothing listens that did not before"
    group = socket.create_server(("127.0.0.1", 0))
    of_group = [socket.create_connection(group.getsockname()), group.accept()[0]]
    socket.setdefaulttimeout(5.0)  # the task may do that
    connections.find()
    connections.shut_down()
    socket.setdefaulttimeout(None)
    assert all(os.get_blocking(one.fileno()) for one in kept)
    for one in of_group:
        assert one.recv(1) == b"", "it was shut down"
    kept[2].sendall(b"x")
    assert kept[0].recv(1) == b"x"
    group.settimeout(10)
    socket.create_connection(group.getsockname()).close()
    group.accept()[0].close()
    for one in (ray, group, *kept, *of_group):
        one.close()
