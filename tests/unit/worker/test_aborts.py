"""Groups whose collectives are aborted, fail late or block, as NCCL's do, with a backend that does so on CPU tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raytrain.errors import TaskError
from raytrain.rendezvous.state import Generation, JoinRequest
from raytrain.worker import group as module
from raytrain.worker.failures import PeerLost, WorkerBroken
from raytrain.worker.group import Group, process_group, serve_store
from raytrain.worker.handover import digest_of
from tests.support.aborting import NAME, AbortingGroup, register
from tests.support.tasks import Regression, WithBatchNorm
from tests.unit.worker.stubs import CPU
from tests.unit.worker.test_step import Bench

pytestmark = pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
GPU = torch.device("cuda")
Form = Callable[[], AbstractContextManager[Group]]


@pytest.fixture
def form(monkeypatch: pytest.MonkeyPatch) -> Form:
    register()
    monkeypatch.setitem(module.BACKENDS, "cpu", NAME)
    monkeypatch.setattr(module, "BACKEND_TIMEOUT_S", 0.2)
    store = serve_store("127.0.0.1")
    generation = Generation(1, (JoinRequest("w0", 0, ("127.0.0.1", store.port)),), "start")
    return lambda: process_group(generation, "w0", store, CPU, 10.0)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Ends what blocks, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


def in_group(form: Form, body: Callable[[Group], object]) -> None:
    with form() as group:
        body(group)


def abort_once_blocked(group: Group) -> threading.Thread:
    """As the heartbeat thread does it when it hears of a lost peer."""

    def wait() -> None:
        assert AbortingGroup.latest.is_blocked.wait(20)
        group.abort()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("exactness", ["default", "bitwise"])
def test_r5_a_step_whose_collectives_were_aborted_is_not_committed(exactness: str, form: Form) -> None:
    """The waits return as if nothing had happened, with sums over some of the ranks."""

    def step(block_at: int | None = None) -> int:
        """Number of collectives in a step, of which the one at `block_at` is aborted."""
        with form() as group:
            bench, backend = Bench(WithBatchNorm(), group, exactness=exactness), AbortingGroup.latest
            before, first = digest_of(bench.state), backend.num_collectives
            if block_at is not None:
                backend.block_from = first + block_at
                aborting = abort_once_blocked(group)
            try:
                bench.run()
            finally:
                bench.train_step.close()
                if block_at is not None:
                    aborting.join()
                    assert digest_of(bench.state) == before
            return backend.num_collectives - first

    num_collectives = step()
    assert num_collectives >= 4, "of losses, gradients and buffers"
    for number in range(num_collectives):
        with pytest.raises(PeerLost, match="aborted"):
            step(block_at=number)


@pytest.mark.parametrize(
    ("settings", "num_waits"),
    [({}, 1), ({"clip_norm": 1.0}, 1), ({"exactness": "bitwise"}, 2), ({"find_unused_parameters": True}, 2)],
    ids=["default", "clipped", "bitwise", "unused parameters"],
)
def test_r6_the_host_reads_nothing_of_a_step_before_it_waits_with_a_limit(
    settings: dict[str, Any], num_waits: int, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each value that is read waits for all that is queued, without a limit."""
    bench, events = Bench(WithBatchNorm(), group, **settings), []
    bench.run()
    monkeypatch.setattr(group, "synchronize", lambda: events.append("wait"))
    for name in ("tolist", "item", "__bool__", "__float__", "__int__", "__index__"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, read=read: (events.append("read"), read(self))[1])
    bench.run()
    bench.train_step.close()
    assert events.count("wait") == num_waits
    assert events[0] == "wait"
    assert "read" in events


def test_r5_what_is_read_from_an_aborted_collective_is_not_used(form: Form) -> None:
    calls: list[Callable[[Group], Any]] = [
        lambda group: group.all_reduce(torch.ones(2)),
        lambda group: group.all_gather_object("mine"),
        lambda group: group.broadcast_object("mine"),
        lambda group: group.broadcast_tensors([torch.ones(2)], [8]),
    ]
    for call in calls:

        def blocked(group: Group, call: Callable[[Group], Any] = call) -> None:
            AbortingGroup.latest.block_from = AbortingGroup.latest.num_collectives
            aborting = abort_once_blocked(group)
            try:
                call(group)
                pytest.fail("a partial result was returned")
            finally:
                aborting.join()

        with pytest.raises(PeerLost, match="aborted"):
            in_group(form, blocked)


@pytest.mark.parametrize(
    "error",
    [
        TaskError("ValueError: the loss is negative", "loss"),
        ValueError("Default process group has not been initialized, please make sure to call init_process_group."),
        RuntimeError("an internal check of DDP"),
        None,
    ],
    ids=["the task's", "no group", "of torch", "none"],
)
def test_whatever_is_raised_after_an_abort_is_the_loss(error: Exception | None, form: Form) -> None:
    """The task may have seen wrong values; if the error is its own, it comes again in the next generation."""

    def body(group: Group) -> None:
        group.abort()
        if error is not None:
            raise error

    with pytest.raises(PeerLost, match="aborted"):
        in_group(form, body)
    assert not dist.is_initialized()


def test_a_collective_that_fails_late_is_the_loss_of_a_peer(form: Form) -> None:
    def body(group: Group) -> None:
        bench = Bench(Regression(), group)
        before = digest_of(bench.state)
        AbortingGroup.latest.error = dist.DistBackendError("NCCL error: remote process exited or there was a network error")
        try:
            bench.run()
        finally:
            assert digest_of(bench.state) == before
            bench.train_step.close()

    with pytest.raises(PeerLost, match="remote process exited"):
        in_group(form, body)


def test_an_abort_that_raises_does_not_end_the_heartbeats(form: Form) -> None:
    def failing() -> None:
        raise RuntimeError("NCCL communicator was aborted already")

    def body(group: Group) -> None:
        AbortingGroup.latest.on_abort = failing
        group.abort()
        group.abort()

    with pytest.raises(PeerLost):
        in_group(form, body)


def test_r6_an_abort_that_blocks_returns_and_breaks_the_worker_in_the_end(form: Form, release: threading.Event) -> None:
    def body(group: Group) -> None:
        AbortingGroup.latest.on_abort = release.wait
        group.abort()
        group.all_reduce(torch.ones(1))

    with pytest.raises(WorkerBroken, match=r"aborting a process group has not returned after 0\.2 s"):
        in_group(form, body)
    release.set()
    dist.destroy_process_group()


def test_r6_destroying_a_group_that_blocks_breaks_the_worker(form: Form, release: threading.Event) -> None:
    with pytest.raises(WorkerBroken, match=r"destroying a process group has not returned after 0\.2 s"), form():
        AbortingGroup.latest.on_shutdown = release.wait
    release.set()


def test_r6_ranks_that_never_connect_break_the_worker(
    form: Form, release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AbortingGroup, "allreduce", lambda *given: release.wait())
    with pytest.raises(WorkerBroken, match="connecting the ranks of a process group has not returned"), form():
        pytest.fail("they are not connected")


@pytest.mark.parametrize(
    ("is_done", "expected", "num_aborts"),
    [
        pytest.param(lambda is_aborted: True, None, 0, id="in time"),
        pytest.param(lambda is_aborted: is_aborted, PeerLost, 1, id="once it is aborted"),
        pytest.param(lambda is_aborted: False, WorkerBroken, 1, id="never: a kernel hangs"),
    ],
)
def test_r6_a_device_that_does_not_finish_has_a_limit(
    is_done: Callable[[bool], bool],
    expected: type[Exception] | None,
    num_aborts: int,
    form: Form,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(expected) if expected else nullcontext(), form() as formed:
        group = Group(formed.generation, 0, GPU, timeout_s=0.05)
        aborts: list[bool] = []
        AbortingGroup.latest.on_abort = lambda: aborts.append(True)
        monkeypatch.setattr(module, "mark_queue", lambda device: lambda: is_done(bool(aborts)))
        try:
            group.synchronize()
        finally:
            assert len(aborts) == num_aborts
