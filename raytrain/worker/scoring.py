"""Calls `loss` and `metrics` on a micro-batch in evaluation; what they return becomes tallies.

Decides nothing about rows and ranks. Runs in the worker's training thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from raytrain.data.loader import Batch
from raytrain.errors import TaskError
from raytrain.worker.context import WorkerContext
from raytrain.worker.hooks import autocast, describe, on_device, seed_everything, user_code
from raytrain.worker.metrics import Tallies, is_metric_object, tally

LOSS = "loss"
"""The name under which the loss is reported."""


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Puts the model in evaluation mode while the block lasts; each module has the mode that it had afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class Scorer:
    """Calls the hooks for micro-batches of one source.

    Calls them without gradients; if that fails the first time, with gradients from then on, for hooks that differentiate,
    such as forces from an energy.
    """

    def __init__(self, context: WorkerContext, model: torch.nn.Module) -> None:
        self.model, self._device = model, context.device
        self.task, self.precision = context.spec.task, context.spec.config.precision
        self.objects: dict[str, Any] = {}
        """The metric objects that `metrics` has returned, by name; reset."""
        self.needs_gradients = False
        self._has_worked = False
        for part in model.modules():
            if is_metric_object(part) and hasattr(part, "_reductions"):  # of torchmetrics: it may hold rows of training
                part.reset()  # type: ignore[operator]

    def __call__(self, columns: Batch, num_rows: int, seed: tuple[int, ...], with_metrics: bool = True) -> Tallies:
        """The tallies of a micro-batch; the hooks may change its columns.

        Args:
            seed: of the random numbers that the hooks draw.

        Raises:
            TaskError: a hook raised, or returned something of another form.
        """
        if not self._has_worked:
            try:
                tallies = self._call(copied(columns), num_rows, seed, with_metrics)
            except TaskError:
                self.needs_gradients = True
            else:
                self._has_worked = True
                return tallies
        tallies = self._call(columns, num_rows, seed, with_metrics)
        self._has_worked = True
        return tallies

    def _call(self, columns: Batch, num_rows: int, seed: tuple[int, ...], with_metrics: bool) -> Tallies:
        batch = on_device(columns, self._device)
        seed_everything(*seed)
        with torch.set_grad_enabled(self.needs_gradients), autocast(self.precision, self._device):
            with user_code("loss in evaluation"):
                values: dict[str, Any] = {LOSS: self.task.loss(self.model, batch)}
            if with_metrics:
                with user_code("metrics in evaluation"):
                    metrics = self.task.metrics(self.model, batch)
                values |= _by_name(metrics)
        objects = {name: value for name, value in values.items() if is_metric_object(value)}
        tallies = {name: tally(value, num_rows, name) for name, value in values.items()}
        for metric in objects.values():
            metric.reset()
        self.objects |= objects
        return tallies


def copied(columns: Batch, rows: slice = slice(None)) -> Batch:
    """A copy of some rows, since a hook may write to its batch."""
    return Batch({name: column[rows].clone() for name, column in columns.items()}, columns.left_out)


def _by_name(metrics: Any) -> dict[str, Any]:
    """What `metrics` returned: a mapping, or a torchmetrics collection."""
    if not callable(getattr(metrics, "items", None)):
        raise TaskError(f"metrics returned {describe(metrics)}; it returns a dict of metrics by name", "metrics")
    named = dict(metrics.items())
    if LOSS in named:
        raise TaskError(f"metrics returned {LOSS!r}, which is the name of the loss; give it another name", "metrics")
    return named
