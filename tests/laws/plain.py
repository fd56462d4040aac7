"""The training that raytrain promises, as a plain single-process PyTorch loop that uses nothing of it.

It is given the task's hooks, the rows of each step and logical worker, and the rule by which each pass is seeded.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class Plain:
    losses: list[float]
    learning_rates: list[float]
    model: dict[str, torch.Tensor]


def seed(*parts: int) -> None:
    number = int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def train(
    task: Any, columns: dict[str, np.ndarray], rows: list[list[np.ndarray]], run_seed: int, clip: float | None
) -> Plain:
    """Trains on `rows[step][logical]`, in one process, one pass for each logical worker."""
    torch.set_num_threads(1)
    seed(run_seed)
    model = task.model()
    optimizer = task.optimizer(model)
    scheduler = task.scheduler(optimizer, len(rows))
    tensors = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in columns.items()}
    losses, rates = [], []
    for step, shares in enumerate(rows):
        optimizer.zero_grad()
        model.train()
        start = {name: buffer.clone() for name, buffer in model.named_buffers()}
        ends: list[dict[str, torch.Tensor]] = []
        total, weight, num_rows = 0.0, 0.0, sum(map(len, shares))
        for logical, share in enumerate(shares):
            if not len(share):
                continue
            for name, buffer in model.named_buffers():
                buffer.copy_(start[name])
            seed(run_seed, step + 1, logical)
            loss = task.loss(model, {name: column[share] for name, column in tensors.items()})
            value, count = loss if isinstance(loss, tuple) else (loss.sum(), len(share))
            (value / num_rows).backward()
            total, weight = total + float(value.detach()), weight + float(count)
            ends.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        for parameter in model.parameters():
            parameter.grad *= num_rows / weight
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        for name, buffer in model.named_buffers():
            values = torch.stack([end[name].double() for end in ends])
            buffer.copy_(values.mean(0) if buffer.is_floating_point() else values.max(0).values)
        losses.append(total / weight)
    return Plain(losses, rates, {name: value.clone() for name, value in model.state_dict().items()})
