"""The process group of one generation: formed, used for small reductions and to hand over bytes, aborted, and destroyed.

Each wait has a limit: the connections of gloo are broken, the collectives of NCCL aborted, and calls into a backend that
may block run beside the training thread. What an error means is known in `failures`. Runs in the worker's
training thread, but for `Group.abort`.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from raytrain.errors import RaytrainError
from raytrain.rendezvous.state import Generation
from raytrain.worker import network
from raytrain.worker.connections import Connections
from raytrain.worker.failures import PeerLost, WorkerBroken, peer_loss, within
from raytrain.worker.tensor_hash import as_bytes

# `torch.distributed.nn` keeps the process group of the moment of its import as a default argument. DDP imports it while a
# group exists, so it is imported here, while there is none; otherwise the first group's sockets would stay open.

FORMING_TIMEOUT_S = 10.0
"""Timeout of the rendezvous of the process group itself: a peer that dies meanwhile is noticed after this time."""
BACKEND_TIMEOUT_S = 60.0
"""Limit of each call into a backend that nothing can interrupt: NCCL's set-up, an abort, and destroying a broken group."""
POLL_S = 0.0001
CHUNK_BYTES = 32 << 20
"""Bytes per broadcast while a state is handed over: each has the collective timeout to itself."""
ALONE_BYTES = 1 << 20
"""Tensors that are larger are sent by themselves, since copying them together would take longer than a broadcast more."""
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

log = logging.getLogger(__name__)


class Group:
    """Ranks 0 to size - 1 of a generation; rank 0 is the leader.

    Args:
        connections: to the peers, for a backend that has no call to abort.
        timeout_s: how long the device may take to finish what was queued on it, its peers' part included.
    """

    def __init__(
        self,
        generation: Generation,
        rank: int,
        device: torch.device,
        connections: Connections | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.generation, self.rank, self.device, self._timeout_s = generation, rank, device, timeout_s
        self.size, self._connections = len(generation.members), connections
        self._to_abort = dist.group.WORLD if dist.is_initialized() and dist.get_backend() != "gloo" else None
        self._aborted, self._lock = threading.Event(), threading.Lock()
        self._abort_thread: threading.Thread | None = None

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def is_aborted(self) -> bool:
        """Whether collectives may have ended without a result, or with a wrong one."""
        return self._aborted.is_set()

    def all_reduce_async(self, vector: torch.Tensor) -> dist.Work:
        """Sums `vector` over the ranks in place; call `wait()` on the result before using it on the device, and
        `synchronize` before anything is decided by it."""
        work: dist.Work = dist.all_reduce(vector, async_op=True)
        return work

    def all_reduce(self, vector: torch.Tensor) -> torch.Tensor:
        """Sums `vector` over the ranks in place, and waits for the result."""
        self.all_reduce_async(vector).wait()
        self.synchronize()
        return vector

    def broadcast_object(self, value: Any) -> Any:
        """Returns the leader's `value` on every rank: a small picklable one; only workers of this run take part."""
        data = torch.empty(0, dtype=torch.uint8)
        if self.is_leader:
            data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int64, device=self.device)
        self._broadcast(length)
        data = data.to(self.device) if self.is_leader else torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self._broadcast(data)
        return value if self.is_leader else pickle.loads(data.cpu().numpy().tobytes())

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in the order of ranks, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        self.synchronize()
        return values

    def broadcast_tensors(
        self,
        tensors: Sequence[torch.Tensor | None],
        num_bytes: Sequence[int],
        on_chunk: Callable[[], None] = lambda: None,
    ) -> None:
        """Copies the leader's tensors to the other ranks, `CHUNK_BYTES` at a time, with the GIL released.

        Large ones are sent from where they lie to where they stay; small ones together.

        Args:
            tensors: those of the leader are read; those of other ranks, contiguous, are written. None takes part and keeps
                nothing.
            num_bytes: of each tensor, on every rank.
            on_chunk: called before each chunk.
        """
        lines = [None if tensor is None else as_bytes(tensor) for tensor in tensors]
        buffer = torch.empty(min(CHUNK_BYTES, sum(num_bytes)), dtype=torch.uint8, device=self.device)
        for pieces in chunks(num_bytes, CHUNK_BYTES, min(ALONE_BYTES, CHUNK_BYTES // 2)):
            on_chunk()
            sizes = [stop - start for _, start, stop in pieces]
            held = [line[start:stop] if (line := lines[n]) is not None else None for n, start, stop in pieces]
            if len(held) == 1 and held[0] is not None and held[0].device == self.device:
                self._broadcast(held[0])
                continue
            chunk = buffer[: sum(sizes)]
            parts = torch.split(chunk, sizes)
            if self.is_leader:
                _copy_all(parts, held)
            self._broadcast(chunk)
            if not self.is_leader:
                _copy_all(held, parts)

    def synchronize(self) -> None:
        """Returns once all that was queued on the device is done, and the collectives among it have good results.

        A collective that was aborted ends like one that has finished, so nothing may be decided or changed by a result
        before this has returned.

        Raises:
            PeerLost: the group was aborted, here or because the device had not finished in time.
            WorkerBroken: the device does not even finish after the abort.
        """
        if self.device.type == "cpu":
            self.raise_if_aborted()
            return
        is_done = mark_queue(self.device)
        if not _poll(is_done, self._timeout_s):
            self.abort()
            if not _poll(is_done, self._timeout_s):
                raise WorkerBroken(
                    f"{self.device} has not finished a kernel for {2 * self._timeout_s:g} s, although its group was aborted"
                )
        self.raise_if_aborted()

    def raise_if_aborted(self) -> None:
        """Raises PeerLost if collectives may have ended without a result, or with a wrong one."""
        if self._aborted.is_set():
            raise PeerLost("the group was aborted, since a peer is lost or did not answer in time")

    def connect(self) -> None:
        """Makes the first collective, in which NCCL connects the ranks, and which no abort reaches.

        Raises:
            WorkerBroken: it blocks.
        """
        if self._to_abort is not None:
            first = torch.zeros(1, device=self.device)
            within(BACKEND_TIMEOUT_S, "connecting the ranks of a process group", lambda: self.all_reduce(first))

    def abort(self) -> None:
        """Aborts the collectives in which the training thread may wait; returns at once. Called from any thread.

        Gloo has no such call: there the connections to the peers are broken, and whatever waits for them raises.
        """
        if self._connections is not None:
            self._connections.shut_down()
        with self._lock:
            if self._to_abort is not None and not self._aborted.is_set():
                self._aborted.set()  # first: from now on a wait may return without a result
                self._abort_thread = threading.Thread(target=_abort, args=(self._to_abort,), name="abort", daemon=True)
                self._abort_thread.start()

    def close(self) -> None:
        """Destroys the process group, which ends the wait of peers that are blocked in it.

        Raises:
            WorkerBroken: the backend blocks.
        """
        with self._lock:
            self._to_abort = None
        if self._abort_thread is not None:
            self._abort_thread.join(BACKEND_TIMEOUT_S)
            if self._abort_thread.is_alive():
                raise WorkerBroken(f"aborting a process group has not returned after {BACKEND_TIMEOUT_S:g} s")
        if self._connections is not None:
            self._connections.shut_down()  # also if something, such as a traceback, still refers to the group
        _destroy()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=0)
        self.synchronize()


def serve_store(host: str) -> TCPStore:
    """The store through which the members of a generation meet that this worker leads."""
    store: TCPStore = network.serve_store(host, FORMING_TIMEOUT_S)
    return store


@contextmanager
def process_group(
    generation: Generation, worker: str, store: TCPStore, device: torch.device, timeout_s: float
) -> Iterator[Group]:
    """The process group of a generation, for as long as the block lasts.

    Raises:
        PeerLost: for each error in the block that means the loss of a peer, and for each error after an abort, since the
            block may have seen wrong results.
        WorkerBroken: this process cannot go on.
    """
    rank, group = generation.rank_of(worker), None
    with peer_loss():
        try:
            if rank:
                host, port = generation.members[0].store
                store = network.join_store(host, port, FORMING_TIMEOUT_S)
            connections = Connections()
            # PyTorch names a group by their number in this process, and counts those that could not be formed; all members
            # need the same name. A group that is destroyed resets the count.
            dist.distributed_c10d._world.group_count = 0
            dist.init_process_group(
                BACKENDS[device.type],
                store=PrefixStore(f"generation-{generation.number}", store),
                rank=rank,
                world_size=len(generation.members),
                timeout=timedelta(seconds=min(timeout_s, FORMING_TIMEOUT_S)),
            )
            limit_s = timeout_s * generation.timeout_factor
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s), dist.group.WORLD)
            connections.find()
            group = Group(generation, rank, device, connections if dist.get_backend() == "gloo" else None, limit_s)
            group.connect()
            yield group
            group.raise_if_aborted()
        except (RaytrainError, RuntimeError, ValueError) as error:
            if group is None or not group.is_aborted or isinstance(error, WorkerBroken):
                raise
            raise PeerLost(f"the group was aborted: {error}") from error
        finally:
            if group is not None:
                group.close()
            else:
                _destroy()


def chunks(num_bytes: Sequence[int], limit: int, alone: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cuts tensors into chunks of at most `limit` bytes, in order; each is a list of (tensor, start, stop).

    A tensor of more than `alone` bytes has chunks of its own.
    """
    chunk: list[tuple[int, int, int]] = []
    room = limit
    for number, size in enumerate(num_bytes):
        is_large = size > alone
        if chunk and (is_large or size > room):
            yield chunk
            chunk, room = [], limit
        if is_large:
            yield from ([(number, start, min(size, start + limit))] for start in range(0, size, limit))
        elif size:
            chunk.append((number, 0, size))
            room -= size
    if chunk:
        yield chunk


def mark_queue(device: torch.device) -> Callable[[], bool]:
    """Whether all that has been queued on the current stream of `device` by now is done, as a function."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.query


def _copy_all(targets: Sequence[torch.Tensor | None], sources: Sequence[torch.Tensor | None]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if target is not None and source is not None:
            target.copy_(source)


def _abort(process_group: dist.ProcessGroup) -> None:
    try:
        process_group.abort()
    except (RuntimeError, ValueError) as error:  # of a group that is broken anyway
        log.debug("aborting the process group failed: %s", error)


def _destroy() -> None:
    if dist.is_initialized():
        within(BACKEND_TIMEOUT_S, "destroying a process group", dist.destroy_process_group)


def _poll(is_done: Callable[[], bool], limit_s: float) -> bool:
    """Whether it is done before the limit."""
    deadline = time.monotonic() + limit_s
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
