"""A process group of one rank that can be aborted, fail late, or block, as NCCL's can; on CPU tensors, without a GPU.

Like NCCL's, an aborted collective ends as if it had finished, and leaves a partial result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

NAME = "aborting"


class AbortingGroup(dist.ProcessGroup):
    """Collectives finish at once until `block_from` is reached.

    Args:
        block_from: the collective, counted from 0 at the first, from which on all block until the group is aborted.
    """

    latest: AbortingGroup

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.block_from: int | None = None
        self.error: Exception | None = None
        """Raised by each collective."""
        self.on_abort: Callable[[], None] = lambda: None
        self.on_shutdown: Callable[[], None] = lambda: None
        self.is_blocked, self._is_aborted = threading.Event(), threading.Event()
        self.num_collectives = 0
        self._pending: list[tuple[Future[Any], Any, list[torch.Tensor]]] = []
        AbortingGroup.latest = self

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self._start(tensors, tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self._start(tensors, tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        outputs[0][0].copy_(inputs[0])
        return self._start(outputs, [])

    def abort(self) -> None:
        self.on_abort()
        self._is_aborted.set()
        for future, result, tensors in self._pending:
            for tensor in tensors:
                tensor.copy_(tensor * 0.5)  # the sum over some of the ranks
            future.set_result(result)

    def shutdown(self) -> None:
        self.on_shutdown()

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return "0"

    def _start(self, result: Any, tensors: list[torch.Tensor]) -> Any:
        if self.error is not None:
            raise self.error
        future: Future[Any] = Future()
        number, self.num_collectives = self.num_collectives, self.num_collectives + 1
        if self.block_from is None or number < self.block_from or self._is_aborted.is_set():
            future.set_result(result)
        else:
            self._pending.append((future, result, tensors))
            self.is_blocked.set()
        return _create_work_from_future(future)


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    return AbortingGroup(rank, size)


def register() -> None:
    if NAME.upper() not in dir(dist.Backend):
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])
