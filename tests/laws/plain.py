"""The training that raytrain promises, as a plain single-process PyTorch loop that uses nothing of it.

It is given the task's hooks, the rows of each step and logical worker, and the rules by which passes and rows are seeded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class Plain:
    losses: list[float]
    learning_rates: list[float]
    model: dict[str, torch.Tensor]
    average: dict[str, torch.Tensor]
    """Exponential moving average of the parameters, if there is a decay."""


def seed(*parts: int) -> None:
    number = int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def read(rows: Any, run_seed: int, epoch: int) -> dict[str, np.ndarray]:
    """The rows of a map-style dataset, as columns, each drawing its own random numbers in this epoch."""
    found = []
    for row in range(len(rows)):
        seed(run_seed, epoch, row, int.from_bytes(b"row", "big"))
        found.append(rows[row])
    return {name: np.stack([each[name] for each in found]) for name in found[0]}


def train(
    task: Any,
    columns: Sequence[dict[str, np.ndarray]],
    rows: list[list[np.ndarray]],
    run_seed: int,
    clip: float | None,
    ema_decay: float | None = None,
    micro_batch: int | None = None,
) -> Plain:
    """Trains on the rows `rows[step][logical]` of `columns[step]`, in one process, one pass for each logical worker."""
    torch.set_num_threads(1)
    seed(run_seed)
    model = task.model()
    modes = {module: module.training for module in model.modules()}
    if any(map(torch.nn.parameter.is_lazy, model.parameters())):
        seed(run_seed, 1, 0)
        task.loss(model.eval(), {name: torch.from_numpy(column[rows[0][0]]) for name, column in columns[0].items()})
    optimizer = task.optimizer(model)
    scheduler = task.scheduler(optimizer, len(rows))
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    losses, rates = [], []
    for step, shares in enumerate(rows):
        tensors = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in columns[step].items()}
        model.train()
        for module, is_training in modes.items():
            module.training = is_training
        for parameter in model.parameters():
            parameter.grad = None
        loss = one_pass_each(task, model, tensors, shares, (run_seed, step + 1), micro_batch)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        rates.append(optimizer.param_groups[0]["lr"])
        seed(run_seed, step + 1, len(shares))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        for name, parameter in model.named_parameters():
            average[name].lerp_(parameter.detach(), 1 - (ema_decay or 0.0))
        losses.append(loss)
    return Plain(losses, rates, {name: value.clone() for name, value in model.state_dict().items()}, average)


def one_pass_each(
    task: Any, model: Any, tensors: Any, shares: list[np.ndarray], seeds: tuple[int, int], micro_batch: int | None
) -> float:
    """Leaves the gradient of the mean loss in the parameters, and in written buffers the mean over the passes."""
    start = {name: buffer.clone() for name, buffer in model.named_buffers()}
    ends: list[dict[str, torch.Tensor]] = []
    total, weight, num_rows = 0.0, 0.0, sum(map(len, shares))
    for logical, share in enumerate(shares):
        if not len(share):
            continue
        for name, buffer in model.named_buffers():
            if not torch.equal(buffer, start[name]):
                buffer.copy_(start[name])
        seed(*seeds, logical)
        for start_row in range(0, len(share), micro_batch or len(share)):
            micro = share[start_row:][: micro_batch or len(share)]
            loss = task.loss(model, {name: column[micro] for name, column in tensors.items()})
            value, count = loss if isinstance(loss, tuple) else (loss.sum(), len(micro))
            (value / num_rows).backward()
            total, weight = total + float(value.detach()), weight + float(count)
        ends.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= num_rows / weight
    for name, buffer in model.named_buffers():
        if any(not torch.equal(end[name], start[name]) for end in ends):
            values = torch.stack([end[name].double() for end in ends])
            buffer.copy_(values.mean(0) if buffer.is_floating_point() else values.max(0).values)
    return total / weight
