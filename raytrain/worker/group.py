"""The process group of one generation: formed, used for small reductions and broadcasts, and destroyed.

Knows how the loss of a peer shows in gloo and NCCL, and raises `PeerLost` for it; decides nothing. Runs in the worker's
training thread.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
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

# `torch.distributed.nn` keeps the process group of the moment of its import as a default argument. DDP imports it while a
# group exists, so it is imported here, while there is none; otherwise the first group's sockets would stay open.

FORMING_TIMEOUT_S = 10.0
"""Timeout of the rendezvous of the process group itself: a peer that dies meanwhile is noticed after this time."""

# gloo reports a dead or silent peer as a RuntimeError with a text of its own; NCCL and the store raise DistError kinds.
_LOSS = re.compile(
    r"connection closed by peer|connection reset|connection refused|broken pipe|socket|timed? ?out|"
    r"gloo|nccl|ncclRemoteError|wait ?timeout|process group|failed to recv|failed to send",
    re.IGNORECASE,
)


class PeerLost(RaytrainError):
    """A collective failed: a peer is gone, or silent for too long. The step in flight is not committed."""


class Group:
    """Ranks 0 to size - 1 of a generation; rank 0 is the leader."""

    def __init__(
        self, generation: Generation, rank: int, device: torch.device, connections: Connections | None = None
    ) -> None:
        self.generation, self.rank, self.device, self._connections = generation, rank, device, connections
        self.size = len(generation.members)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def all_reduce_async(self, vector: torch.Tensor) -> dist.Work:
        """Sums `vector` over the ranks in place; call `wait()` on the result before reading it."""
        work: dist.Work = dist.all_reduce(vector, async_op=True)
        return work

    def all_reduce(self, vector: torch.Tensor) -> torch.Tensor:
        self.all_reduce_async(vector).wait()
        return vector

    def broadcast_object(self, value: Any) -> Any:
        """Returns the leader's `value` on every rank: any picklable value, since only workers of this run take part."""
        data = torch.empty(0, dtype=torch.uint8)
        if self.is_leader:
            data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int64, device=self.device)
        dist.broadcast(length, src=0)
        data = data.to(self.device) if self.is_leader else torch.empty(int(length), dtype=torch.uint8, device=self.device)
        dist.broadcast(data, src=0)
        return value if self.is_leader else pickle.loads(data.cpu().numpy().tobytes())

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in the order of ranks, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def abort(self) -> None:
        """Aborts the collectives in which the training thread waits; called from another thread.

        Gloo has no such call: there the connections to the peers are broken. Not exercised on several GPUs yet.
        """
        if self.device.type == "cuda" and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
        elif self._connections is not None:
            self._connections.shut_down()


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
        PeerLost: for each error in the block that means the loss of a peer.
    """
    rank = generation.rank_of(worker)
    with peer_loss():
        try:
            if rank:
                host, port = generation.members[0].store
                store = network.join_store(host, port, FORMING_TIMEOUT_S)
            connections = Connections()
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore(f"generation-{generation.number}", store),
                rank=rank,
                world_size=len(generation.members),
                timeout=timedelta(seconds=min(timeout_s, FORMING_TIMEOUT_S)),
            )
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s * generation.timeout_factor), dist.group.WORLD)
            connections.find()
            yield Group(generation, rank, device, connections)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()  # closes the sockets, which ends the wait of blocked peers


@contextmanager
def peer_loss() -> Iterator[None]:
    """Raises `PeerLost` for the errors by which a lost peer shows; all others pass."""
    try:
        yield
    except RaytrainError:
        raise
    except dist.DistError as error:
        raise PeerLost(str(error)) from error
    except RuntimeError as error:
        if not _LOSS.search(str(error)):
            raise
        raise PeerLost(str(error)) from error
