"""Calls of the user's code: its errors, the values that it returns, and its random numbers. Runs in the worker."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch

from raytrain.data.loader import Batch
from raytrain.data.seeding import seed_generators
from raytrain.data.source import Columns
from raytrain.errors import ConfigError, RaytrainError, TaskError, task_traceback
from raytrain.task import Loss, Task
from raytrain.worker.failures import raise_failure


@contextmanager
def user_code(where: str) -> Iterator[None]:
    """Raises a `TaskError` for an exception of the user's code, with a traceback of the user's frames.

    A lost peer in a collective of the user's code, as SyncBatchNorm has them, or a failure of the GPU is raised as such.
    """
    try:
        yield
    except RaytrainError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's code raises is the user's to see
        raise_failure(error, in_task=True)
        remote = error.__cause__ if isinstance(error.__cause__, RaytrainError) else None  # raised in a process of Ray Data
        shown = str(remote) if remote else task_traceback(error)
        raise TaskError(shown, where, "".join(traceback.format_exception(error))) from None


def as_sum(value: torch.Tensor | Loss | float, rows: int, name: str) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The sum and the weight of a value that `loss` or `metrics` returned.

    Args:
        value: one value per row (shape [rows]), a `Loss`, or a mean over the rows (scalar).
        rows: rows of the micro-batch.
        name: of the hook, for the error.

    Raises:
        TaskError: the value has another form.
    """
    if isinstance(value, Loss):
        total, weight = as_scalar(value.sum), as_scalar(value.weight)
        if total is not None and weight is not None:
            return total, weight.detach()
        got = f"Loss({describe(value.sum)}, {describe(value.weight)})"
        raise TaskError(f"{name} returned {got}; the sum and the weight of a Loss are numbers or scalar tensors", name)
    mean = as_scalar(value)
    if mean is not None:
        return mean * rows, rows
    if isinstance(value, torch.Tensor) and value.shape == (rows,):
        return _at_least_single(value).sum(), rows
    rule = "it returns a tensor of shape [rows], a scalar, or Loss"
    raise TaskError(f"{name} returned {describe(value)} for {rows} rows; {rule}", name)


def check_loss(task: Task, model: torch.nn.Module, loss: torch.Tensor) -> None:
    """Checks, before the first backward pass, that there is something for it to do.

    Raises:
        ConfigError: the loss has no gradient, or the hook has called backward itself.
    """
    where, rule = (
        f"{type(task).__name__}.loss",
        "raytrain calls backward, sums the gradients of all workers, and steps the optimizer",
    )
    if any(parameter.grad is not None for parameter in model.parameters()):
        fix = "return the loss, and call neither backward() nor an optimizer; one loss may serve several optimizers"
        raise ConfigError(where, "called backward() itself", rule, fix)
    if not loss.requires_grad:
        value = "a value that depends on no parameter that is trained"
        raise ConfigError(where, value, rule, "return the loss of the model's output, without detach() or torch.no_grad()")


def as_scalar(value: object) -> torch.Tensor | None:
    """A number or scalar tensor as a tensor of shape []; None for anything else."""
    if isinstance(value, float | int | np.number | np.bool_):
        return torch.tensor(float(value), dtype=torch.float64)
    return _at_least_single(value) if isinstance(value, torch.Tensor) and value.ndim == 0 else None


def _at_least_single(values: torch.Tensor) -> torch.Tensor:
    """Half precision is widened: a sum over some hundred rows would keep two digits of it."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def describe(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def own_transform(task: Task) -> Callable[[Columns], Columns] | None:
    """The task's `transform`, or None if it does not have one of its own."""
    return None if type(task).transform is Task.transform else task.transform


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The autocast context of a forward pass."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`.

    They are copied from pinned memory: a copy from other memory makes the host wait for all that is queued on the device.
    """
    if device.type == "cpu":
        return batch
    pinned = {name: column.pin_memory() if device.type == "cuda" else column for name, column in batch.items()}
    return Batch({name: column.to(device, non_blocking=True) for name, column in pinned.items()}, batch.left_out)


def shapes_of(batch: Batch) -> int:
    """A number for the shapes and types of the batch's tensors; code that is compiled is compiled again for new ones."""
    return hash(tuple((name, column.shape, column.dtype) for name, column in batch.items()))


def seed_everything(*parts: int) -> None:
    """Seeds the generators of torch (all devices), numpy and Python from the numbers `parts`."""
    number = seed_generators(*parts)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)
