"""What is this node like? Runs on each node, in one actor without CPUs, and answers with plain values.

Sent to the nodes by value, since raytrain may be missing there: only Python and what Ray brings is imported at the top.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from raytrain.cluster.doctor.files import read, write
from raytrain.cluster.doctor.host import gather, show_all_gpus
from raytrain.cluster.doctor.ring import all_reduce
from raytrain.worker.network import join_store, network_variables, serve_store


class Probe:
    """A visitor of one node. What may hang has a limit of its own, so that it can say how far it got.

    Args:
        variables: that a run's workers take over from the driver where they have none of their own.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        import ray

        self._host = ray.util.get_node_ip_address()
        self._temp = ray._private.worker._global_node.get_session_dir_path()
        self._store: Any = None
        show_all_gpus(os.environ, os.getppid())
        for name, value in {**network_variables(self._host), **variables}.items():
            os.environ.setdefault(name, value)

    def facts(self) -> dict[str, Any]:
        """The arguments of `facts.Facts`."""
        return gather(self._temp, os.getppid())

    def now(self) -> float:
        """Unix seconds."""
        return time.time()

    def storage(self, directory: str, theirs: str, mine: str, limit_s: float) -> str:
        """Reads the driver's file and writes one of its own; what went wrong, or ""."""
        error = within(limit_s, read, directory, theirs)[1]
        if error:
            return f"cannot read what the driver wrote ({error})"
        error = within(limit_s, write, directory, mine)[1]
        return f"cannot write ({error})" if error else ""

    def torch(self) -> dict[str, Any]:
        """The arguments of `facts.Torch`."""
        try:
            import torch
            import torch.distributed
        except (ImportError, OSError) as error:  # OSError: a library that it needs
            return {"gpus": 0, "nccl": "", "error": str(error)}
        version: Any = torch.cuda.nccl.version  # it has no types
        has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
        nccl = ".".join(map(str, version())) if has_nccl else ""
        return {"gpus": torch.cuda.device_count(), "nccl": nccl, "error": ""}

    def serve_store(self, limit_s: float) -> tuple[str, int, str]:
        """Host and port of the store that this process, rank 0, offers to the others; and why it does not, or ""."""
        self._store, error = within(limit_s, serve_store, self._host, limit_s)
        return self._host, self._store.port if self._store else 0, error

    def all_reduce(self, backend: str, rank: int, size: int, store: tuple[str, int], limit_s: float) -> dict[str, Any]:
        """The arguments of `facts.Ring`."""
        progress: dict[str, Any] = {"phase": "finding the first node"}
        own_limit_s = 0.8 * limit_s  # its error says more than ours

        def take_part() -> tuple[float, float]:
            here = self._store if rank == 0 else join_store(*store, own_limit_s)
            return all_reduce(progress, backend, rank, size, here, own_limit_s)

        answer, error = within(limit_s, take_part)
        if answer is None:
            return {**progress, "error": error}
        return {"phase": "done", "done": True, "latency_s": answer[0], "bytes_per_s": answer[1]}


def within(limit_s: float, function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """What a function returns, or None and why it does not; it goes on in a thread of its own if it takes too long."""
    outcome: list[tuple[Any, str]] = []

    def call() -> None:
        try:
            outcome.append((function(*args), ""))
        except (OSError, RuntimeError, ValueError, ImportError) as error:
            outcome.append((None, f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(limit_s)
    if outcome:
        return outcome[0]
    return None, f"timed out after {limit_s:g} s" if thread.is_alive() else "ended without an answer"
