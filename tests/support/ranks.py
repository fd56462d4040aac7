"""Ranks of one group as threads of the test's process: the product's group, with collectives exchanged in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from raytrain.worker.group import Group


class Exchange:
    """Where all ranks leave a value, and take those of the others."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier, self.num_ranks = threading.Barrier(num_ranks, timeout=10), num_ranks
        self._values: list[Any] = [None] * num_ranks

    def __call__(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self.barrier.wait()
        values = list(self._values)
        self.barrier.wait()
        return values


class ThreadGroup(Group):
    """One rank; `broadcasts` has the sizes in bytes of what it took part in."""

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank, self.size, self.device, self._exchange = rank, exchange.num_ranks, torch.device("cpu"), exchange
        self.broadcasts: list[int] = []

    def die(self) -> None:
        """The collectives of the others fail from now on."""
        self._exchange.barrier.abort()

    def all_reduce(self, vector: torch.Tensor) -> torch.Tensor:
        return vector.copy_(torch.stack(self._exchange(self.rank, vector.clone())).sum(0))

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._exchange(self.rank, value)

    def synchronize(self) -> None:
        pass

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self.broadcasts.append(tensor.numel() * tensor.itemsize)
        tensor.copy_(self._exchange(self.rank, tensor.clone())[0])


def in_ranks(call: Callable[[int, ThreadGroup], Any], num_ranks: int) -> list[Any]:
    """Calls `call(rank, group)` on all ranks at once; returns what each returned or raised."""
    exchange = Exchange(num_ranks)

    def run(rank: int) -> Any:
        try:
            return call(rank, ThreadGroup(rank, exchange))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))
