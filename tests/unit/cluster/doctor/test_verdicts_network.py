"""Each row about what is between machines: green where all is well, red for each fault, and what it says then."""

from __future__ import annotations

import pytest

from raytrain.cluster.doctor import verdicts_network as verdicts
from raytrain.cluster.doctor.facts import Clock, Ring
from tests.unit.cluster.doctor.values import A, B, facts, node, ring

NODES = {A: node(A), B: node(B)}
NOPE = (
    "RuntimeError: [enforce fail at /src/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: nope0"
)
CLOSED = "RuntimeError: [/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:31003"


def test_nodes_that_answer_and_stay_are_green() -> None:
    row = verdicts.nodes(NODES, {})
    assert (row.state, row.found) == ("ok", "2 nodes, all answer and stay")


def test_nodes_that_leave_or_are_silent_are_red() -> None:
    leaving = {A: node(A), B: node(B, leaves_in_s=95.0)}
    row = verdicts.nodes(leaving, {})
    assert (row.state, row.found) == ("red", f"{B}: leaves in 1 min 35 s")
    row = verdicts.nodes(leaving, {A: "no answer in 15 s"})
    assert (row.state, row.found) == ("red", f"{A}: no answer in 15 s; {B}: leaves in 1 min 35 s")
    assert verdicts.nodes({A: node(A, leaves_in_s=0.0)}, {}).found == f"{A}: is announced to leave"


def test_a_storage_that_all_share_is_green() -> None:
    row = verdicts.storage("/shared/runs", {}, 2)
    assert (row.state, row.found) == ("ok", "/shared/runs: written and read by the driver and 2 nodes")


def test_a_storage_that_some_cannot_use_is_red() -> None:
    row = verdicts.storage("/runs", {B: "cannot write (OSError: no)", "c": "cannot write (OSError: no)"}, 3)
    assert (row.state, row.found) == ("red", f"/runs: {B}, c: cannot write (OSError: no)")
    assert "--storage" in row.fix


def test_an_all_reduce_between_all_is_green_and_the_slowest_is_told() -> None:
    slow = ring(latency_s=0.0031, bytes_per_s=100 * 2**20)
    row = verdicts.all_reduce({"gloo": {A: ring(), B: slow}, "nccl": {A: ring(), B: ring()}}, 15)
    assert row.state == "ok"
    assert row.found == "2 nodes: gloo 3.1 ms, 100.0 MiB/s; nccl 210 µs, 1.1 GiB/s"
    assert verdicts.all_reduce({"gloo": {A: ring()}}, 15).found == "gloo: a group forms on the only node"
    assert verdicts.all_reduce({"gloo": {}}, 15).state == "-"


def test_a_node_with_an_error_of_its_own_is_named_and_not_those_that_waited_for_it() -> None:
    parts = {A: Ring("connecting", "timed out after 15 s"), B: Ring("connecting", NOPE), "c": Ring("summing", CLOSED)}
    row = verdicts.all_reduce({"gloo": parts}, 15)
    assert (row.state, row.found) == ("red", f"gloo: {B}: Unable to find address for: nope0")
    assert row.fix.startswith("GLOO_SOCKET_IFNAME")


def test_where_all_only_waited_those_that_got_least_far_are_named() -> None:
    waits = Ring("connecting", "timed out after 15 s")
    parts = {A: waits, B: Ring("finding the first node", "RuntimeError: connection timed out"), "c": waits}
    row = verdicts.all_reduce({"gloo": {A: ring()}, "nccl": parts}, 15)
    assert (row.state, row.found) == ("red", f"nccl: {B}: no answer after 15 s while finding the first node")
    assert row.fix.startswith("NCCL_SOCKET_IFNAME")
    both = verdicts.all_reduce({"gloo": {A: waits, "c": waits}}, 15)
    assert both.found == f"gloo: {A}, c: no answer after 15 s while connecting"
    assert "starting" in verdicts.all_reduce({"gloo": {A: waits, B: Ring("starting")}}, 15).found


def test_a_wrong_sum_is_red() -> None:
    wrong = Ring("summing", "RuntimeError: wrong sum: 1 to 1 instead of 3")
    row = verdicts.all_reduce({"gloo": {A: wrong, B: wrong}}, 15)
    assert (row.state, row.found) == ("red", f"gloo: {A}, {B}: wrong sum: 1 to 1 instead of 3")


def test_interfaces_that_peers_reach_are_green() -> None:
    row = verdicts.interfaces(NODES, {A: facts(), B: facts(interface="", interface_address=B)})
    assert (row.state, row.found) == ("ok", "by hostname, eth0; none is loopback")
    here = {A: node(A), "10.0.0.1 (3f3f3f)": node(A)}
    local = facts(interface="", interface_address="127.0.1.1")
    assert verdicts.interfaces(here, {A: local}).state == "ok", "on one machine loopback is as good"


@pytest.mark.parametrize(
    ("interface", "address", "found"),
    [("", "127.0.1.1", "offers 127.0.1.1 (of its hostname node1)"), ("lo", "127.0.0.1", "offers 127.0.0.1 (lo)")],
)
def test_a_node_that_offers_loopback_to_others_is_red(interface: str, address: str, found: str) -> None:
    row = verdicts.interfaces(NODES, {A: facts(), B: facts(interface=interface, interface_address=address)})
    assert (row.state, row.found) == ("red", f"{B}: {found}")


def test_an_interface_that_is_not_there_is_left_to_the_all_reduce() -> None:
    assert verdicts.interfaces(NODES, {A: facts(), B: facts(interface="nope0", interface_address="")}).state == "ok"


@pytest.mark.parametrize(
    ("offset", "uncertainty", "state", "found"),
    [
        (0.02, 0.001, "ok", "within 21 ms of the driver's"),
        (-100.0, 0.001, "red", f"{B}: 1 min 40 s behind the driver's"),
        (1.5, 0.001, "red", f"{B}: 1.5 s ahead of the driver's"),
        (1.5, 0.7, "ok", "within 2.2 s of the driver's"),
    ],
)
def test_clocks(offset: float, uncertainty: float, state: str, found: str) -> None:
    row = verdicts.clocks({A: Clock(0.0, 0.001), B: Clock(offset, uncertainty)})
    assert (row.state, row.found) == (state, found)


def test_no_clock_is_not_judged() -> None:
    assert verdicts.clocks({}).state == "-"


@pytest.mark.parametrize(
    ("address", "token", "state"),
    [
        ("10.0.0.1:6379", False, "ok"),
        ("127.0.0.1:6379", False, "ok"),
        ("head.local:6379", False, "ok"),
        ("8.8.8.8:6379", False, "red"),
        ("[2001:4860:4860::8888]:6379", False, "red"),
        ("8.8.8.8:6379", True, "ok"),
    ],
)
def test_a_head_at_a_public_address_without_a_token_is_red(address: str, token: bool, state: str) -> None:
    assert verdicts.access(address, token).state == state
