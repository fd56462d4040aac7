"""Whose fault an error is: a peer's, the machine's, or the task's."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from raytrain.errors import InternalError, RaytrainError, TaskError
from raytrain.worker.failures import PeerLost, WorkerBroken, failure_of, peer_loss, within
from raytrain.worker.hooks import user_code

GONE = [
    RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:22942"),
    RuntimeError("Gloo connectFullMesh failed with ..."),
    RuntimeError("NCCL error: remote process exited"),
    dist.DistNetworkError("failed"),
    dist.DistBackendError("NCCL communicator was aborted on rank 1."),
    ValueError("Default process group has not been initialized, please make sure to call init_process_group."),
    ValueError("Invalid process group specified or has been destroyed."),
]
BROKEN = [
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    RuntimeError("CUDA error: unknown error"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
]
OF_TASK = [
    RuntimeError("shape mismatch"),
    ValueError("connection closed by peer"),
    torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("CUDA error: invalid configuration argument"),
    TypeError("Input tensor data type is not supported for NCCL process group: UInt16"),
    RuntimeError("Input tensor data type is not supported for NCCL process group: UInt16"),
    RuntimeError("Cannot use ReduceOp.BAND with NCCL"),
    dist.DistBackendError("NCCL error: ncclInvalidUsage, Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 0"),
    ValueError("Invalid scalar type in gloo"),
    KeyError("nccl"),
]


@pytest.mark.parametrize("error", [*GONE, RuntimeError("Timed out waiting 3000ms for recv operation to complete")])
def test_errors_of_the_transport_and_the_store_are_the_loss_of_a_peer(error: Exception) -> None:
    with pytest.raises(PeerLost), peer_loss():
        raise error


@pytest.mark.parametrize("error", [*OF_TASK, InternalError("gloo")])
def test_other_errors_and_those_that_no_other_group_would_mend_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, peer_loss():
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        (GONE, PeerLost),
        (BROKEN, WorkerBroken),
        ([*OF_TASK, torch.AcceleratorError("CUDA error: device-side assert triggered")], TaskError),
        ([RuntimeError("timed out waiting for my service"), RuntimeError("socket of mine is closed")], TaskError),
    ],
    ids=["peers", "machine", "task", "its own words"],
)
def test_errors_in_the_tasks_code_are_those_of_peers_and_machines_too(
    errors: list[Exception], expected: type[RaytrainError]
) -> None:
    """SyncBatchNorm has collectives in `loss`, and a GPU may fail anywhere."""
    for error in errors:
        with pytest.raises(expected), user_code("loss"):
            raise error


def test_a_kernel_of_the_task_that_fails_late_is_the_tasks_error() -> None:
    with pytest.raises(TaskError, match="CUDA_LAUNCH_BLOCKING"), peer_loss():
        raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize(("own_gib", "expected"), [(60, None), (20, WorkerBroken)])
def test_memory_that_others_hold_is_not_the_tasks_mistake(own_gib: int, expected: type[Exception] | None) -> None:
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 64.00 GiB of which 512.00 MiB is "
        f"free. Process 4 has 40.00 GiB in use. Of the allocated memory {own_gib}.00 GiB is allocated by PyTorch, and "
        "31.5 MiB is reserved by PyTorch but unallocated."
    )
    failure = failure_of(torch.OutOfMemoryError(text))
    assert type(failure) is (expected or type(None))


def test_a_call_that_never_returns_breaks_the_worker_and_its_errors_pass() -> None:
    release = threading.Event()
    with pytest.raises(WorkerBroken, match=r"destroying has not returned after 0\.05 s"):
        within(0.05, "destroying", release.wait)
    release.set()
    with pytest.raises(KeyError):
        within(10.0, "destroying", lambda: {}["key"])
