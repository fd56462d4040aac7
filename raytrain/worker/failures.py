"""Whose fault is an error in a training step: a lost peer's, this process' or its machine's, or the task's?

Knows by which texts the three show in gloo, NCCL and CUDA. A lost peer breaks the group, a broken worker is replaced, and
an error of the task ends the run. Decides nothing else. Runs in the worker's training thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from raytrain.errors import RaytrainError, TaskError
from raytrain.timeout import CallTimeout, call_within

# gloo reports a dead or silent peer as a RuntimeError with a text of its own; NCCL and the store raise DistError kinds.
_TRANSPORT = r"gloo|nccl|process group has not been initialized|process group specified"
_LOSS_IN_TASK = re.compile(_TRANSPORT, re.IGNORECASE)
_LOSS = re.compile(
    rf"{_TRANSPORT}|process group|connection closed by peer|connection reset|connection refused|broken pipe|socket|"
    r"timed? ?out|wait ?timeout|failed to recv|failed to send",
    re.IGNORECASE,
)
_PERMANENT = re.compile(
    r"not supported|unsupported|cannot use|invalid scalar type|ncclInvalidArgument|ncclInvalidUsage", re.IGNORECASE
)
"""No other group would do better: a type that the backend cannot reduce, or two ranks on one GPU."""

_DEVICE = re.compile(r"(?:CUDA|HIP|cuDNN|cuBLAS|CUBLAS) (?:error|failure)\W*(.*)", re.IGNORECASE)
_KERNEL_OF_TASK = re.compile(r"device-side assert", re.IGNORECASE)
_CALL_OF_TASK = re.compile(
    r"invalid|no kernel image|out of memory|not supported|not permitted|ALLOC_FAILED|BAD_PARAM|ARCH_MISMATCH", re.IGNORECASE
)
_GIB = {"bytes": 2.0**-30, "KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0}
OWN_SHARE = 0.9
"""A process that asks for less than this share of its GPU's memory, all in all, finds it where no other process is."""


class PeerLost(RaytrainError):
    """A collective failed: a peer is gone, or silent for too long. The step in flight is not committed."""


class WorkerBroken(RaytrainError):
    """This process, or its machine, cannot go on, but another one can: its process ends and is replaced."""


def failure_of(error: BaseException, in_task: bool = False) -> RaytrainError | None:
    """The `PeerLost` or `WorkerBroken` that an error means; None if it is an error of the code that raised it.

    Args:
        error: as it was raised.
        in_task: whether the task's code raised it, which may speak of sockets and timeouts of its own.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return WorkerBroken(f"other processes hold the GPU's memory: {text}") if is_memory_held_by_others(text) else None
    if not isinstance(error, RuntimeError | ValueError):
        return None
    is_from_group = isinstance(error, dist.DistError)
    if is_from_group or (_LOSS_IN_TASK if in_task else _LOSS).search(text):
        is_ours = is_from_group or isinstance(error, RuntimeError) or "process group" in text
        return PeerLost(text) if is_ours and not _PERMANENT.search(text) else None
    if (found := _DEVICE.search(text)) and not _KERNEL_OF_TASK.search(text) and not _CALL_OF_TASK.search(found[1]):
        return WorkerBroken(f"the GPU failed: {text}")
    return None


def raise_failure(error: BaseException, in_task: bool = False) -> None:
    """Raises the failure that an error means, if it means one."""
    failure = failure_of(error, in_task)
    try:
        if failure is not None:
            raise failure from error
    finally:
        del failure  # its traceback holds this frame, and all of them hold the process group


@contextmanager
def peer_loss() -> Iterator[None]:
    """Raises `PeerLost` or `WorkerBroken` for the errors that mean one, in our own code; all others pass."""
    try:
        yield
    except RaytrainError:
        raise
    except (RuntimeError, ValueError) as error:
        if _KERNEL_OF_TASK.search(str(error)):  # shows at whatever waits for the device next
            text = f"{error}\nset CUDA_LAUNCH_BLOCKING=1 to see where"
            raise TaskError(text, "a kernel that the task's code has started") from error
        raise_failure(error)
        raise


def is_memory_held_by_others(message: str) -> bool:
    """Whether an allocation failed only because of other processes on the GPU, by PyTorch's message about it."""
    asked, total, allocated, spare = (
        _gib(message, pattern)
        for pattern in (
            r"Tried to allocate {}",
            r"total capacity of {}",
            r"{} is allocated by PyTorch",
            r"{} is reserved by PyTorch",
        )
    )
    return total > 0 and asked + allocated + spare < OWN_SHARE * total


def _gib(message: str, pattern: str) -> float:
    found = re.search(pattern.format(r"([\d.]+) (bytes|KiB|MiB|GiB)"), message)
    return float(found[1]) * _GIB[found[2]] if found else 0.0


def within(limit_s: float, what: str, call: Callable[[], object]) -> None:
    """Runs `call` in a thread of its own, and raises what it raises.

    Raises:
        WorkerBroken: it has not returned after `limit_s` seconds; nothing but the end of the process ends it.
    """
    try:
        call_within(limit_s, call)
    except CallTimeout:
        raise WorkerBroken(f"{what} has not returned after {limit_s:g} s") from None
