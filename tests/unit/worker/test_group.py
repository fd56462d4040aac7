"""Forming the group of a generation, and how the loss of a peer looks."""

from __future__ import annotations

import time
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from raytrain.errors import InternalError
from raytrain.rendezvous.state import Entrant, Generation
from raytrain.worker import group as module
from raytrain.worker.group import Group, PeerLost, form, peer_loss, serve_store

CPU = torch.device("cpu")


def test_a_value_is_shared_and_gathered(group: Group) -> None:
    assert group.leads
    assert group.share({"a": 1}) == {"a": 1}
    assert group.gather("mine") == ["mine"]
    assert group.sum(torch.tensor([2.0])).item() == 2.0


def test_nothing_is_left_of_a_group_after_its_block() -> None:
    store = serve_store("127.0.0.1")
    generation = Generation(1, (Entrant("w0", 0, ("127.0.0.1", store.port)),), "start")
    for number in (1, 2):  # the store serves one generation after the other
        with form(Generation(number, generation.members, "loss"), "w0", store, CPU, 10.0):
            assert dist.is_initialized()
        assert not dist.is_initialized()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_store_listens_on_the_address_of_its_host_alone(host: str) -> None:
    store = serve_store(host)
    assert [address for address, port in listening() if port == store.port] == [host]
    store.set("key", "value")
    assert TCPStore(host, store.port, is_master=False).get("key") == b"value"


def test_a_group_listens_on_no_more_than_one_address() -> None:
    store = serve_store("127.0.0.1")
    before = listening()
    with form(Generation(1, (Entrant("w0", 0, ("127.0.0.1", store.port)),), "start"), "w0", store, CPU, 10.0):
        opened = listening() - before
    assert opened, "gloo waits for its peers"
    assert not {address for address, _ in opened} & {"0.0.0.0", "::"}


def listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def test_r6_a_peer_that_never_comes_is_given_up_soon_however_long_a_step_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORMING_TIMEOUT_S", 0.5)
    store = serve_store("127.0.0.1")
    members = (Entrant("w0", 0, ("127.0.0.1", store.port)), Entrant("w1", 0, ("127.0.0.1", 1)))
    started = time.monotonic()
    with pytest.raises(PeerLost), form(Generation(1, members, "start"), "w0", store, CPU, 60.0):
        pytest.fail("there is no group of two")
    assert time.monotonic() - started < 30


def test_r6_a_leader_that_is_gone_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORMING_TIMEOUT_S", 0.5)
    store = serve_store("127.0.0.1")
    members = (Entrant("w1", 0, ("127.0.0.1", 1)), Entrant("w0", 0, ("127.0.0.1", store.port)))
    with pytest.raises(PeerLost), form(Generation(1, members, "start"), "w0", store, CPU, 60.0):
        pytest.fail("there is no leader")


def test_r6_the_limit_of_a_collective_grows_with_the_patience_of_its_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[timedelta] = []
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda limit, group: limits.append(limit))
    store = serve_store("127.0.0.1")
    members = (Entrant("w0", 0, ("127.0.0.1", store.port)),)
    for number, patience in ((1, 1), (2, 8)):
        with form(Generation(number, members, "loss", patience=patience), "w0", store, CPU, 20.0):
            pass
    assert limits == [timedelta(seconds=20), timedelta(seconds=160)]


@pytest.mark.parametrize(("device", "num_aborts"), [("cuda", 1), ("cpu", 0)])
def test_r6_nccl_is_broken_from_outside_and_gloo_is_left_alone(
    device: str, num_aborts: int, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted: list[str] = []
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: aborted.append("all"))
    Group(group.generation, group.rank, torch.device(device)).abort()
    assert len(aborted) == num_aborts


def test_there_is_nothing_to_break_when_the_group_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: pytest.fail("there is none"))
    Group(Generation(1, (), "start"), 0, torch.device("cuda")).abort()


@pytest.mark.parametrize(
    "text",
    [
        "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:22942",
        "Timed out waiting 3000ms for recv operation to complete",
        "Gloo connectFullMesh failed with ...",
        "NCCL error: remote process exited",
    ],
)
def test_errors_of_the_transport_are_the_loss_of_a_peer(text: str) -> None:
    with pytest.raises(PeerLost), peer_loss():
        raise RuntimeError(text)


def test_errors_of_the_store_are_the_loss_of_a_peer() -> None:
    with pytest.raises(PeerLost), peer_loss():
        raise dist.DistNetworkError("failed")


@pytest.mark.parametrize(
    "error", [RuntimeError("shape mismatch"), ValueError("connection closed by peer"), InternalError("gloo")]
)
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, peer_loss():
        raise error
    assert caught.value is error
