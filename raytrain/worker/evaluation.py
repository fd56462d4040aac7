"""Evaluation on the current weights: every row of a source once, weighted, the same value for any number of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import torch

from raytrain.data.batch import MicroBatch
from raytrain.errors import RaytrainError
from raytrain.rendezvous.generation import Signals
from raytrain.rendezvous.vitals import READING, WAITING
from raytrain.task import Loss
from raytrain.worker.group import Group
from raytrain.worker.hooks import as_sum, autocast, on_device, seed_everything, user_code
from raytrain.worker.surroundings import Surroundings

KEEP_TOGETHER_STEPS = 4
"""The ranks wait for each other so often: a slow one is not taken for lost, a lost one is noticed, all hear of signals."""

IN_EVALUATION = "in an evaluation"

Sums = dict[str, tuple[float, float]]
"""(sum, weight) by metric."""


class BrokenOff(RaytrainError):
    """An evaluation that all ranks have broken off, since somebody leaves or the run is to stop; it is done anew later."""

    def __init__(self, signals: Signals) -> None:
        super().__init__("an evaluation was broken off")
        self.signals = signals


def evaluate(
    around: Surroundings,
    model: torch.nn.Module,
    group: Group,
    name: str,
    held: range,
    heard: Callable[[], Signals] = Signals,
) -> dict[str, float]:
    """The metrics of one source, "<name>/loss" and "<name>/<metric>".

    The sums of each logical worker are added up in the order of logical workers, so the values do not depend on how they
    are dealt out, not even in the last bit.

    Args:
        heard: what this rank has heard by now; it breaks the evaluation off where time is short.

    Raises:
        BrokenOff: on all ranks.
    """
    num_steps = around.plans[name].steps_per_epoch
    mine: dict[int, Sums] = defaultdict(dict)
    model.eval()
    with torch.no_grad(), closing(around.feed(name, held, 0, num_steps)) as feed:
        for step in range(num_steps):
            if step % KEEP_TOGETHER_STEPS == 0:
                around.pulse.mark(WAITING)
                _go_on_unless_called(group, heard())
            around.pulse.mark(READING)
            with user_code(f"transform, or reading, of {name!r} on rank {group.rank}"):
                shares = feed.step(step)
            around.pulse.mark(IN_EVALUATION)
            for logical, micros in shares.items():
                seed_everything(step, logical)
                for micro in micros:
                    _add(mine[logical], _sums_of(around, model, micro))
    around.pulse.mark(WAITING)
    everyone: dict[int, Sums] = {}
    for some in group.gather(dict(mine)):
        everyone.update(some)
    total: Sums = {}
    for logical in sorted(everyone):
        _add(total, everyone[logical])
    return {f"{name}/{key}": value / weight if weight else 0.0 for key, (value, weight) in total.items()}


def _go_on_unless_called(group: Group, heard: Signals) -> None:
    calls = group.sum(torch.tensor([heard.save, heard.stop, heard.leave], dtype=torch.float64, device=group.device))
    save, stop, leave = (value > 0 for value in calls.tolist())
    if stop or leave:
        raise BrokenOff(Signals(gather=leave, save=save, stop=stop, leave=leave))


def _sums_of(around: Surroundings, model: torch.nn.Module, micro: MicroBatch) -> Sums:
    task, batch, rows = around.task, on_device(micro.columns, around.device), len(micro.rows)
    with autocast(around.config.precision, around.device):
        with user_code("loss in evaluation"):
            answers: dict[str, torch.Tensor | Loss] = {"loss": task.loss(model, batch)}
        with user_code("metrics in evaluation"):
            answers.update(task.metrics(model, batch))
    pairs = {key: as_sum(answer, rows, key) for key, answer in answers.items()}
    return {key: (float(value), float(weight)) for key, (value, weight) in pairs.items()}


def _add(total: Sums, more: Mapping[str, Sequence[float]]) -> None:
    for key, (value, weight) in more.items():
        before = total.get(key, (0.0, 0.0))
        total[key] = (before[0] + value, before[1] + weight)
