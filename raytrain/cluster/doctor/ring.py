"""Can this process sum a tensor with one on every other node, and how fast? Runs on the nodes.

Sent to them by value, since raytrain may be missing there: nothing of raytrain is imported, and torch only when it runs.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

SMALL, BIG = 1, 2**21
"""Elements of the two tensors, 4 bytes each."""
SMALL_REPEATS, BIG_REPEATS = 20, 3


def all_reduce(
    progress: MutableMapping[str, Any], backend: str, rank: int, size: int, store: Any, limit_s: float
) -> tuple[float, float]:
    """Latency in seconds of a small tensor, and bus bandwidth in bytes per second with one of 8 MiB.

    Args:
        progress: its "phase" says how far it got, also while it waits.
        backend: gloo or nccl.
        limit_s: of the forming, and of each sum.

    Raises:
        RuntimeError: no connection, or a wrong sum.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    progress["phase"] = "connecting"
    limit = timedelta(seconds=limit_s)
    dist.init_process_group(backend, store=PrefixStore(backend, store), rank=rank, world_size=size, timeout=limit)
    progress["phase"] = "summing"
    try:
        vector = torch.full((BIG,), rank + 1.0, device=device)
        dist.all_reduce(vector)
        check_sum(vector, size)
        latency_s = _seconds(torch.zeros(SMALL, device=device), SMALL_REPEATS)
        seconds = _seconds(torch.zeros(BIG, device=device), BIG_REPEATS)
        _wait_for_all(PrefixStore(f"{backend}-end", store), rank, size)
    finally:
        dist.destroy_process_group()
    return latency_s, bus_bandwidth(4 * BIG, seconds, size)


def bus_bandwidth(size_bytes: int, seconds: float, num_ranks: int) -> float:
    """Bytes per second that each link carries in an all-reduce: S/t * 2(n-1)/n; doc/PERFORMANCE.md of nccl-tests."""
    return size_bytes / seconds * 2 * (num_ranks - 1) / num_ranks


def check_sum(vector: Any, size: int) -> None:
    """Rank r gave r + 1, so that the sum is n(n + 1)/2, exact in float32 up to 5000 ranks.

    Raises:
        RuntimeError: it is another one.
    """
    expected = size * (size + 1) / 2
    if not bool((vector == expected).all()):
        raise RuntimeError(f"wrong sum: {vector.min().item():g} to {vector.max().item():g} instead of {expected:g}")


def _wait_for_all(store: Any, rank: int, size: int) -> None:
    """Who leaves closes its connections, and the last sum of others may still be on its way."""
    store.set(str(rank), "done")
    store.wait([str(other) for other in range(size)])


def _seconds(vector: Any, repeats: int) -> float:
    """For one all-reduce, on average; zeros stay zeros."""
    import torch
    import torch.distributed as dist

    began = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(vector)
    if vector.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats
