"""How the laws compare a run with the plain loop."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import safetensors.torch
import torch

from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.launch.schedule import build_schedule
from raytrain.rundir import RunDir
from raytrain.task import Task
from tests.laws import plain
from tests.support.tasks import NUM_ROWS, TASKS, WithAugmentation

RELATIVE = 1e-6
NUM_LOGICAL = 4
LAW_SETTINGS: dict[str, Any] = {
    "workers": (1, 4),
    "logical_workers": NUM_LOGICAL,
    "global_batch": 16,
    "epochs": 3,
    "seed": 5,
    "audit": True,
    "clip_norm": 1.0,
    "cpus_per_worker": 0.5,
}


def settings(**more: Any) -> RunConfig:
    return RunConfig(**LAW_SETTINGS | {"name": "run"} | more)


@cache
def by_hand(kind: str, config: RunConfig) -> plain.Plain:
    """The plain loop on the rows of the plan."""
    return train_by_hand(TASKS[kind], config)


def train_by_hand(task: Task, config: RunConfig) -> plain.Plain:
    work = build_schedule(task, config)
    rows = [[work.train.row_ids(step, logical) for logical in range(NUM_LOGICAL)] for step in range(work.num_steps)]
    num_epochs = -(-work.num_steps // work.train.steps_per_epoch)
    if isinstance(task, WithAugmentation):
        epochs = [plain.read(task.rows("train"), config.seed, epoch) for epoch in range(num_epochs)]
    else:
        epochs = [work.sources["train"].take(np.arange(NUM_ROWS))] * num_epochs
    columns = [epochs[step // work.train.steps_per_epoch] for step in range(work.num_steps)]
    return plain.train(task, columns, rows, config.seed, config.clip_norm, config.ema_decay, config.micro_batch)


def final_weights(run_dir: RunDir, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    store = CheckpointStore(run_dir)
    newest = store.newest_verified()
    assert newest is not None
    return dict(safetensors.torch.load(store.read(newest, file)))


def assert_same(run_dir: RunDir, steps: dict[int, Any], expected: plain.Plain, relative: float = RELATIVE) -> None:
    """Losses of all steps, learning rates and final weights agree."""
    assert list(steps) == list(range(len(expected.losses)))
    np.testing.assert_allclose([record.loss for record in steps.values()], expected.losses, rtol=relative)
    np.testing.assert_allclose([record.learning_rate for record in steps.values()], expected.learning_rates, rtol=1e-12)
    assert_close(final_weights(run_dir), expected.model, relative)


def assert_close(
    weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float = RELATIVE, least: float = 0.0
) -> None:
    """Up to rounding, for each tensor that is expected; relative to its largest value, or `least` if that is smaller."""
    for name, other in expected.items():
        wide = torch.complex128 if other.is_complex() else torch.float64
        scale = max(float(other.to(wide).abs().max()), least)
        difference = float((weights[name].to(wide) - other.to(wide)).abs().max())
        assert difference <= relative * scale, f"{name} differs by {difference / max(scale, 1e-30):.1e}"
