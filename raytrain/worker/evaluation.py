"""Evaluation on the current weights: every row of a source once, weighted, the same value for any number of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import torch

from raytrain.data.loader import MicroBatch
from raytrain.errors import RaytrainError
from raytrain.rendezvous.health import READING, WAITING
from raytrain.rendezvous.state import Signals
from raytrain.task import Loss
from raytrain.worker.context import WorkerContext
from raytrain.worker.group import Group
from raytrain.worker.hooks import as_sum, autocast, on_device, seed_everything, user_code

SYNC_EVERY_STEPS = 4
"""The ranks wait for each other this often: a slow one does not run into a timeout, a lost one and signals are noticed."""

IN_EVALUATION = "in an evaluation"

Sums = dict[str, tuple[float, float]]
"""(sum, weight) by metric."""


class EvaluationInterrupted(RaytrainError):
    """All ranks have interrupted an evaluation because some drain or the run stops; it is repeated later."""

    def __init__(self, signals: Signals) -> None:
        super().__init__("an evaluation was interrupted")
        self.signals = signals


def evaluate(
    context: WorkerContext,
    model: torch.nn.Module,
    group: Group,
    name: str,
    assigned: range,
    pending: Callable[[], Signals] = Signals,
) -> dict[str, float]:
    """The metrics of one source, "<name>/loss" and "<name>/<metric>".

    The sums of each logical worker are added in the order of logical workers, so the values do not depend on how those are
    assigned to ranks, not even in the last bit.

    Args:
        pending: the signals of this rank so far; a stop or a drain interrupts the evaluation.

    Raises:
        EvaluationInterrupted: on all ranks.
    """
    num_steps = context.spec.plans[name].steps_per_epoch
    sums: dict[int, Sums] = defaultdict(dict)
    model.eval()
    with torch.no_grad(), closing(context.loader(name, assigned, 0, num_steps)) as loader:
        for step in range(num_steps):
            if step % SYNC_EVERY_STEPS == 0:
                context.heartbeat.set_activity(WAITING)
                _check_signals(group, pending())
            context.heartbeat.set_activity(READING)
            with user_code(f"transform, or reading, of {name!r} on rank {group.rank}"):
                batches = loader.step(step)
            context.heartbeat.set_activity(IN_EVALUATION)
            for logical, micros in batches.items():
                seed_everything(step, logical)
                for micro in micros:
                    _add(sums[logical], _evaluate_batch(context, model, micro))
    context.heartbeat.set_activity(WAITING)
    all_sums: dict[int, Sums] = {}
    for of_rank in group.all_gather_object(dict(sums)):
        all_sums.update(of_rank)
    total: Sums = {}
    for logical in sorted(all_sums):
        _add(total, all_sums[logical])
    return {f"{name}/{key}": value / weight if weight else 0.0 for key, (value, weight) in total.items()}


def _check_signals(group: Group, pending: Signals) -> None:
    flags = torch.tensor([pending.save, pending.stop, pending.drain], dtype=torch.float64, device=group.device)
    save, stop, drain = (value > 0 for value in group.all_reduce(flags).tolist())
    if stop or drain:
        raise EvaluationInterrupted(Signals(regroup=drain, save=save, stop=stop, drain=drain))


def _evaluate_batch(context: WorkerContext, model: torch.nn.Module, micro: MicroBatch) -> Sums:
    task, batch, rows = context.spec.task, on_device(micro.columns, context.device), len(micro.row_ids)
    with autocast(context.spec.config.precision, context.device):
        with user_code("loss in evaluation"):
            values: dict[str, torch.Tensor | Loss] = {"loss": task.loss(model, batch)}
        with user_code("metrics in evaluation"):
            values.update(task.metrics(model, batch))
    pairs = {key: as_sum(value, rows, key) for key, value in values.items()}
    return {key: (float(value), float(weight)) for key, (value, weight) in pairs.items()}


def _add(total: Sums, more: Mapping[str, Sequence[float]]) -> None:
    for key, (value, weight) in more.items():
        so_far = total.get(key, (0.0, 0.0))
        total[key] = (so_far[0] + value, so_far[1] + weight)
