"""Each row of the report: its state and what it says. Rows in the golden tables (`test_table`) are not repeated here."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain.cluster.doctor import verdicts
from raytrain.cluster.doctor.probe import PACKAGES
from raytrain.cluster.doctor.verdicts import AllReduce, Clock, Disk, Facts, Node, Row, Torch

GIB = 2**30
A, B = "10.0.0.1", "10.0.0.2"
VERSIONS = {"python": "3.11.7", "raytrain": "0.1.0", **dict.fromkeys(PACKAGES, "1.0")}
VERSIONS |= {"ray": "2.60.0", "torch": "2.13.0+cu128"}
NOPE = "RuntimeError: [enforce fail at /src/tcp/device.cc:84] ifa != nullptr. Unable to find address for: nope0"
CLOSED = "RuntimeError: [/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:31003"


def node(name: str = A, **more: Any) -> Node:
    return Node(**{"name": name, "node_id": "3f" * 28, "address": name, "gpus": 0.0, "object_store_bytes": 2 * GIB, **more})


def facts(**more: Any) -> Facts:
    values: dict[str, Any] = {
        "hostname": "node1",
        "versions": VERSIONS,
        "raytrain_digest": "abc",
        "gpu_drivers": (),
        "interface": "eth0",
        "interface_address": A,
        "open_files": 65536,
        "session_disk": Disk("/tmp/ray/session", 50 * GIB, 100 * GIB),
        "object_store": "/dev/shm",
        "shm_bytes": 4 * GIB,
    }
    return Facts(**{**values, **more})


def torch(gpus: int = 0, nccl: str = "", error: str = "") -> Torch:
    return Torch(gpus, nccl, error)


def part(**more: Any) -> AllReduce:
    values: dict[str, Any] = {"phase": "done", "done": True, "latency_s": 0.00021, "bytes_per_s": 1.1 * GIB}
    return AllReduce(**{**values, **more})


def of_b(**more: Any) -> dict[str, Facts]:
    """Of a healthy node A, and of B."""
    return {A: facts(), B: facts(**more)}


NODES = {A: node(A), B: node(B)}
TORCHES = {A: torch(), B: torch()}
DRAINING = {A: node(A), B: node(B, drains_in_s=95.0)}
BROKEN = {A: torch(), B: torch(error="libcudart.so.12: not found")}
WAITS = AllReduce("connecting", "timed out after 15 s")
FAR = AllReduce("finding the first node", "RuntimeError: connection timed out")
WRONG = AllReduce("summing", "RuntimeError: wrong sum: 1 to 1 instead of 3")
SLOW = part(latency_s=0.0031, bytes_per_s=100 * 2**20)
ONE_HOST = {A: node(A), "10.0.0.1 (3f3f3f)": node(A)}
MANY = "python 7 (driver: 3.11.7), raytrain 7 (driver: 0.1.0), ray 7 (driver: 2.60.0) and 14 more"


def with_drivers(*drivers: str, nccl: str = "2.27.5") -> Row:
    both = {A: facts(gpu_drivers=("550.54",)), B: facts(gpu_drivers=drivers)}
    return verdicts.drivers(both, {A: torch(1, "2.27.5"), B: torch(1, nccl)})


def packages(**more: Any) -> Row:
    return verdicts.packages(facts(), of_b(**more), {})


def disk(free: float, total: float, least: float) -> Row:
    return verdicts.disk(None, of_b(session_disk=Disk("/tmp/ray", int(free * GIB), int(total * GIB))), least * GIB)


@pytest.mark.parametrize(
    ("row", "state", "found"),
    [
        (verdicts.nodes(DRAINING, {}), "red", f"{B}: draining, terminates in 1 min 35 s"),
        (verdicts.nodes({A: node(A, drains_in_s=0.0)}, {}), "red", f"{A}: draining"),
        (verdicts.gpus(NODES, TORCHES), "-", "no node has any"),
        (verdicts.gpus(NODES, {A: torch(), B: torch(2)}), "red", f"{B}: Ray offers 0, torch sees 2"),
        (verdicts.gpus({A: node(), B: node(gpus=2.0)}, BROKEN), "-", "no node has any"),
        (verdicts.drivers(of_b(), TORCHES), "-", "nvidia-smi shows no GPU on any node"),
        (with_drivers("550.54", nccl="2"), "red", f"{A}: driver 550.54, NCCL 2.27.5; {B}: driver 550.54, NCCL 2"),
        (with_drivers("5", "4"), "red", f"{A}: driver 550.54, NCCL 2.27.5; {B}: driver 5 and 4, NCCL 2.27.5"),
        (packages(versions=VERSIONS | {"raytrain": ""}), "red", f"{B}: no raytrain (driver: 0.1.0)"),
        (packages(raytrain_digest="xyz"), "red", f"{B}: raytrain's files differ from the driver's"),
        (packages(versions=dict.fromkeys(VERSIONS, "7")), "red", f"{B}: {MANY}"),
        (verdicts.packages(facts(), of_b(), BROKEN), "red", f"{B}: torch cannot be imported (libcudart.so.12: not found)"),
        (verdicts.storage("/runs", {B: "OSError: no", "c": "OSError: no"}, 3), "red", f"/runs: {B}, c: no"),
        (verdicts.all_reduce({"gloo": {A: part()}}, 15), "ok", "gloo: works on the only node"),
        (verdicts.all_reduce({"gloo": {A: part(), B: SLOW}}, 15), "ok", "2 nodes: gloo 3.1 ms, 100.0 MiB/s"),
        (verdicts.all_reduce({"gloo": {}}, 15), "-", "no node answered"),
        (verdicts.all_reduce({"gloo": {A: WRONG, B: WRONG}}, 15), "red", f"gloo: {A}, {B}: wrong sum: 1 to 1 instead of 3"),
        (verdicts.interfaces(NODES, of_b(interface="", interface_address=B)), "ok", "by hostname, eth0; none is loopback"),
        (verdicts.interfaces(ONE_HOST, of_b(interface_address="127.0.1.1")), "ok", "all nodes are on one machine"),
        (
            *(verdicts.interfaces(NODES, of_b(interface="lo", interface_address="127.0.0.1")), "red"),
            f"{B}: offers 127.0.0.1 (lo)",
        ),
        (verdicts.interfaces(NODES, of_b(interface="nope0", interface_address="")), "ok", "eth0, nope0; none is loopback"),
        (verdicts.clocks({B: Clock(1.5, 0.001)}), "red", f"{B}: 1.5 s ahead of the driver's"),
        (verdicts.clocks({B: Clock(1.5, 0.7)}), "ok", "within 2.2 s of the driver's"),
        (verdicts.clocks({}), "-", "no node answered"),
        (verdicts.disk(Disk("/runs", 7 * GIB, 100 * GIB), of_b(), GIB), "ok", "at least 7.0 GiB free"),
        (verdicts.disk(Disk("/runs", 0, 100 * GIB), of_b(), GIB), "red", "storage: 0 B of 100.0 GiB free at /runs"),
        (verdicts.disk(None, {}, GIB), "-", "no node answered"),
        (disk(40, 1000, 1), "red", f"{B}: 40.0 GiB of 1000.0 GiB free at /tmp/ray"),
        (verdicts.shared_memory(NODES, {A: facts(shm_bytes=0)}), "-", "no node has /dev/shm"),
        (
            *(verdicts.shared_memory(NODES, of_b(object_store="", shm_bytes=GIB)), "red"),
            f"{B}: store of 2.0 GiB in /dev/shm, /dev/shm has 1.0 GiB",
        ),
        (verdicts.open_files(of_b(open_files=8192)), "ok", "limit 8,192 or more"),
        (verdicts.open_files(of_b(open_files=8191)), "red", f"{B}: limit 8,191"),
        (verdicts.open_files(of_b(open_files=-1)), "ok", "limit 65,536 or more"),
        (verdicts.open_files({A: facts(open_files=-1)}), "ok", "no limit"),
        (verdicts.cpus(1.0, 0, 1.0), "ok", "1 free; reading needs 1"),
        (verdicts.cpus(9.0, 4, 2.0), "ok", "9 free; 4 workers and reading need 9"),
        (verdicts.cpus(8.0, 4, 2.0), "red", "8 free; 4 workers and reading need 9"),
        (verdicts.access("head.local:6379", False), "ok", "no token, but head.local:6379 is not a public address"),
        (verdicts.access("10.0.0.1:6379", False), "ok", "no token, but 10.0.0.1:6379 is not a public address"),
        (
            *(verdicts.access("[2606:4700::8]:1", False), "red"),
            "[2606:4700::8]:1 is a public address, and Ray requires no token",
        ),
    ],
)
def test_a_row_says_what_was_found_and_how_to_fix_it(row: Row, state: str, found: str) -> None:
    assert (row.state, row.found, bool(row.fix)) == (state, found, state == "red")


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        (
            {A: WAITS, B: AllReduce("connecting", NOPE), "c": AllReduce("summing", CLOSED)},
            f"{B}: Unable to find address for: nope0",
        ),
        ({A: WAITS, B: FAR, "c": WAITS}, f"{B}: no answer after 15 s while finding the first node"),
        ({A: WAITS, "c": WAITS}, f"{A}, c: no answer after 15 s while connecting"),
        ({A: WAITS, B: AllReduce("starting")}, f"{B}: no answer after 15 s while starting"),
    ],
)
def test_a_failed_all_reduce_names_the_nodes_that_caused_it(parts: dict[str, AllReduce], found: str) -> None:
    row = verdicts.all_reduce({"gloo": {A: part()}, "nccl": parts}, 15)
    assert (row.state, row.found) == ("red", f"nccl: {found}")
    assert row.fix.startswith("set NCCL_SOCKET_IFNAME")


def test_many_nodes_and_findings_are_counted() -> None:
    assert verdicts.join_names("abcdefg") == "a, b, c and 4 more"
    assert verdicts.summarize({"a": "x", "b": "y", "c": "x"}) == "a, c: x; b: y"
    assert verdicts.summarize({name: name for name in "abcde"}) == "a: a; b: b; c: c; and 2 more"
