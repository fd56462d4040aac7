"""Small tasks for the laws: each has one of the things that make results depend on workers elsewhere."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import raytrain

NUM_ROWS, NUM_VALID, WIDTH = 203, 37, 12


class Regression(raytrain.Task):
    """A small net on made data; rows are numbered in the column `row`."""

    lr: float = 0.05

    def data(self) -> dict[str, Any]:
        generator = np.random.Generator(np.random.PCG64(7))
        values = generator.standard_normal((NUM_ROWS + NUM_VALID, WIDTH)).astype(np.float32)
        target = np.sin(values[:, :1] * 2) + values[:, 1:2] * values[:, 2:3]
        length = generator.integers(1, 9, NUM_ROWS + NUM_VALID)
        columns = {"x": values, "y": target, "length": length, "row": np.arange(len(values))}
        return {
            "train": raytrain.arrays(**{name: column[:NUM_ROWS] for name, column in columns.items()}),
            "valid": raytrain.arrays(**{name: column[NUM_ROWS:] for name, column in columns.items()}),
        }

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return (model(batch["x"]) - batch["y"]).pow(2).sum(1)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"mae": F.l1_loss(model(batch["x"]), batch["y"])}


class WithDropout(Regression):
    """Random numbers in the forward pass, and an optimizer with a state of its own."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr / 10)

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)


class WithBatchNorm(Regression):
    """Buffers that the forward pass updates."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 1))


class WithTokenWeights(Regression):
    """A loss per token: the weights of rows differ."""

    def loss(self, model: nn.Module, batch: Any) -> raytrain.Loss:
        each = (model(batch["x"]) - batch["y"]).pow(2).sum(1)
        return raytrain.Loss((each * batch["length"]).sum(), batch["length"].sum())


class WithPlateau(WithDropout):
    """A schedule that depends on evaluations; two optimizers."""

    def optimizer(self, model: Any) -> Any:
        first, last = model[0].parameters(), model[3].parameters()
        return [torch.optim.AdamW(first, lr=self.lr / 10), torch.optim.SGD(last, lr=self.lr, momentum=0.9)]

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)


class BrokenMetric(Regression):
    """Its evaluation fails on the rank that has the last rows, once a weight is larger than `limit`."""

    limit: float = 0.0

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        if int(batch["row"].max()) == NUM_ROWS + NUM_VALID - 1 and float(model[0].weight.abs().max()) > self.limit:
            raise ValueError("no such class")
        return {"rows": raytrain.Sum(len(batch["row"]))}


class AugmentedRows:
    """A map-style dataset that changes its rows with numbers from all random generators."""

    def __init__(self, source: Any) -> None:
        self.num_rows, self.columns = source.num_rows, source.take(np.arange(source.num_rows))

    def __len__(self) -> int:
        return int(self.num_rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        values = {name: column[row] for name, column in self.columns.items()}
        noise = 0.1 * torch.randn(WIDTH).numpy() + 0.1 * np.random.standard_normal(WIDTH)
        return values | {"x": (values["x"] * random.uniform(0.5, 1.5) + noise).astype(np.float32)}


class WithAugmentation(WithDropout):
    """Random numbers in the rows of a map-style dataset."""

    def rows(self, name: str) -> AugmentedRows:
        return AugmentedRows(super().data()[name])

    def data(self) -> dict[str, Any]:
        return {name: raytrain.dataset(self.rows(name)) for name in ("train", "valid")}


TASKS = {
    "dropout": WithDropout(),
    "batch norm": WithBatchNorm(lr=0.02),
    "token weights": WithTokenWeights(),
    "augmentation": WithAugmentation(),
}


class Gated(WithDropout):
    """Takes its time for as long as the file `gate` exists, so that a test can wait for what it wants to see."""

    gate: str = ""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if model.training and self.gate and Path(self.gate).exists():
            time.sleep(0.15)
        return super().loss(model, batch)


class WithEverything(Regression):
    """Random numbers, buffers, and weights of rows at once, under AdamW."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr / 10)

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)

    def loss(self, model: nn.Module, batch: Any) -> raytrain.Loss:
        each = (model(batch["x"]) - batch["y"]).float().pow(2).sum(1)
        return raytrain.Loss((each * batch["length"]).sum(), batch["length"].sum())


class WithMomentum(WithEverything):
    """The same under SGD with momentum."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr / 10, momentum=0.9)


class WideMomentum(torch.optim.Optimizer):
    """Keeps its state in another type than the weights', and a word beside it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            slots = self.state[p]
            slots.setdefault("kind", "heavy ball")
            slots.setdefault("signs", [torch.zeros(p.shape, dtype=torch.bool)])
            slots["signs"] = [p.grad < 0]
            slots["average"] = 0.9 * slots.get("average", torch.zeros(p.shape, dtype=torch.float64)) + p.grad.double() / 3
            p -= (self.param_groups[0]["lr"] * slots["average"]).to(p.dtype)


class OnBrokenGpu(WithDropout):
    """The GPU fails once, on a row of an early step; the state of the optimizer is wider than the weights."""

    mark: str = ""
    bad_row: int = -1

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return WideMomentum(model.parameters(), self.lr)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if (batch["row"] == self.bad_row).any() and not Path(self.mark).exists():
            Path(self.mark).touch()
            raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
        return super().loss(model, batch)
