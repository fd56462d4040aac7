"""The all-reduce of two processes of this machine, and how its speed is counted."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from raytrain.cluster.doctor.ring import bus_bandwidth, check_sum

SCRIPT = """
import sys, json
from raytrain.cluster.doctor import ring
from raytrain.worker import network
rank, size, port = map(int, sys.argv[1:])
if rank == 0:
    store = network.serve_store("127.0.0.1", 50)
    print(store.port, flush=True)
else:
    store = network.join_store("127.0.0.1", port, 50)
progress = {}
latency_s, rate = ring.all_reduce(progress, "gloo", rank, size, store, 50)
print(json.dumps([progress["phase"], latency_s > 0, rate > 0]), flush=True)
sys.stdin.read()  # the store stays as long as others may ask it
"""


def process(rank: int, port: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(rank), "2", port]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_processes_sum() -> None:
    first = process(0, "0")
    assert first.stdout is not None
    second = process(1, first.stdout.readline().strip())
    assert second.stdout is not None
    assert [one.stdout.readline() for one in (second, first) if one.stdout] == ['["summing", true, true]\n'] * 2
    for one in (second, first):
        one.communicate(timeout=60)


def test_a_wrong_sum_is_noticed() -> None:
    check_sum(torch.full((4,), 6.0), 3)
    with pytest.raises(RuntimeError, match="wrong sum: 3 to 6 instead of 6"):
        check_sum(torch.tensor([6.0, 3.0]), 3)


@pytest.mark.parametrize(("ranks", "expected"), [(1, 0.0), (2, 100.0), (4, 150.0)])
def test_the_bus_bandwidth_is_that_of_nccl_tests(ranks: int, expected: float) -> None:
    assert bus_bandwidth(200, 2.0, ranks) == pytest.approx(expected)
