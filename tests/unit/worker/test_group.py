"""Forming the process group of a generation, and how the loss of a peer shows."""

from __future__ import annotations

import time
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from raytrain.rendezvous.state import Generation, JoinRequest
from raytrain.worker import group as module
from raytrain.worker.failures import PeerLost
from raytrain.worker.group import Group, chunks, process_group, serve_store
from raytrain.worker.network import network_variables
from tests.support.local import CONTEXT

CPU = torch.device("cpu")


def test_a_value_is_shared_and_gathered(group: Group) -> None:
    assert group.is_leader
    assert group.broadcast_object({"a": 1}) == {"a": 1}
    assert group.all_gather_object("mine") == ["mine"]
    assert group.all_reduce(torch.tensor([2.0])).item() == 2.0


def alone(store: TCPStore, number: int = 1, patience: int = 1) -> Generation:
    return Generation(number, (JoinRequest("w0", 0, ("127.0.0.1", store.port)),), "loss", timeout_factor=patience)


def test_r6_a_store_serves_groups_one_after_the_other_with_limits_for_their_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[timedelta] = []
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda limit, group: limits.append(limit))
    store = serve_store("127.0.0.1")
    for number, patience in ((1, 1), (2, 8)):
        with process_group(alone(store, number, patience), "w0", store, CPU, 20.0):
            assert dist.is_initialized()
        assert not dist.is_initialized(), "nothing is left of it"
    assert limits == [timedelta(seconds=20), timedelta(seconds=160)]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_store_listens_on_the_address_of_its_host_alone(host: str) -> None:
    store = serve_store(host)
    assert [address for address, port in listening() if port == store.port] == [host]
    store.set("key", "value")
    assert TCPStore(host, store.port, is_master=False).get("key") == b"value"


def test_a_group_listens_on_no_more_than_one_address() -> None:
    store = serve_store("127.0.0.1")
    before = listening()
    with process_group(alone(store), "w0", store, CPU, 10.0):
        opened = listening() - before
    assert opened, "gloo waits for its peers"
    assert not {address for address, _ in opened} & {"0.0.0.0", "::"}


def listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("is_leader", [True, False])
def test_r6_a_leader_or_a_peer_that_is_gone_is_given_up_soon(is_leader: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORMING_TIMEOUT_S", 0.5)
    store = serve_store("127.0.0.1")
    members = (JoinRequest("w0", 0, ("127.0.0.1", store.port)), JoinRequest("w1", 0, ("127.0.0.1", 1)))
    generation = Generation(1, members if is_leader else members[::-1], "start")
    started = time.monotonic()
    with pytest.raises(PeerLost), process_group(generation, "w0", store, CPU, 60.0):
        pytest.fail("there is no group of two")
    assert time.monotonic() - started < 30, "however long a step may take"


def meet(generation: Generation) -> None:
    """A newcomer that takes part in one sum."""
    with process_group(generation, "w2", serve_store("127.0.0.1"), CPU, 10.0) as formed:
        formed.all_reduce(torch.ones(1))


def test_p2_a_worker_whose_group_could_not_be_formed_meets_a_newcomer_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    store = serve_store("127.0.0.1")
    me, lost, newcomer = (JoinRequest(name, 0, ("127.0.0.1", store.port)) for name in ("w0", "w1", "w2"))
    with monkeypatch.context() as patch:
        patch.setattr(module, "FORMING_TIMEOUT_S", 0.5)
        with pytest.raises(PeerLost), process_group(Generation(1, (me, lost), "start"), "w0", store, CPU, 60.0):
            pytest.fail("there is no group of two")
    generation = Generation(2, (me, newcomer), "loss")
    process = CONTEXT.Process(target=meet, args=(generation,), daemon=True)
    process.start()
    try:
        with process_group(generation, "w0", store, CPU, 10.0) as formed:
            assert formed.all_reduce(torch.ones(1)).item() == 2.0
        process.join(10)
        assert process.exitcode == 0
    finally:
        process.kill()


@pytest.mark.parametrize(("limit", "alone"), [(1, 0), (5, 2), (8, 4), (100, 4), (100, 100)])
def test_chunks_cover_all_bytes_once_and_in_order(limit: int, alone: int) -> None:
    sizes = [3, 0, 12, 1, 8, 2]
    cut = list(chunks(sizes, limit, alone))
    assert [(n, i) for piece in cut for n, start, stop in piece for i in range(start, stop)] == [
        (n, i) for n, size in enumerate(sizes) for i in range(size)
    ]
    assert all(0 < sum(stop - start for _, start, stop in piece) <= limit for piece in cut)
    assert all(len(piece) == 1 for piece in cut if any(sizes[n] > alone for n, _, _ in piece))


def test_the_interface_is_the_one_that_has_the_address() -> None:
    interfaces = {name: {one.address for one in found} for name, found in psutil.net_if_addrs().items()}
    for address in set[str]().union(*interfaces.values()):
        found = network_variables(address)
        assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"]
        assert address in interfaces[found["GLOO_SOCKET_IFNAME"]]
    assert network_variables("127.0.0.1")["GLOO_SOCKET_IFNAME"] == "lo"
    assert network_variables("203.0.113.7") == {}, "no interface has it: gloo and NCCL choose"
