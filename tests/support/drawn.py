"""Random small tasks and random histories of workers, each drawn from one number."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

import raytrain
from tests.support.local import Kill, Plot
from tests.support.models import Langevin, OwnStatistics
from tests.support.tasks import WIDTH, Regression

PLACES = ("before forward", "after forward", "after backward", "before commit", "after commit", "before recording")
NUM_STEPS = 6


class Block(nn.Module):
    """A layer with one of the things that make results depend on workers elsewhere; keeps the width."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        norm = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}.get(kind)
        self.layer = nn.Linear(WIDTH, WIDTH, bias=kind != "batch")  # before BatchNorm a bias has a gradient of pure rounding
        self.after: nn.Module = norm(WIDTH) if norm else nn.Dropout(0.2) if kind == "dropout" else nn.Identity()
        if kind == "spectral":
            self.layer = nn.utils.parametrizations.spectral_norm(self.layer)
        elif kind == "statistics":
            self.after = OwnStatistics()
        elif kind == "frozen":
            self.layer.requires_grad_(False)
        elif kind == "frozen batch":
            self.after = nn.BatchNorm1d(WIDTH).eval()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
        changed = self.after(self.layer(x)) if not isinstance(self.after, OwnStatistics) else self.layer(x) + self.after(x)
        return x + torch.tanh(changed)  # type: ignore[no-any-return]


KINDS = ("plain", "batch", "layer", "dropout", "spectral", "statistics", "frozen", "frozen batch")


class Drawn(Regression):
    """Its model, optimizer, schedule and loss follow from `number`."""

    number: int = 0

    @cached_property
    def choice(self) -> dict[str, Any]:
        draw = np.random.default_rng(self.number)
        return {
            "blocks": [str(kind) for kind in draw.choice(KINDS, draw.integers(1, 4))],
            "tied": bool(draw.integers(3) == 0),
            "thaws": bool(draw.integers(4) == 0),
            "optimizer": str(draw.choice(["sgd", "momentum", "adamw", "rmsprop", "noisy"])),
            "groups": bool(draw.integers(2)),
            "schedule": str(draw.choice(["none", "step", "cosine", "one cycle"])),
            "weighs": bool(draw.integers(3) == 0),
        }

    def model(self) -> nn.Module:
        blocks = [Block(kind) for kind in self.choice["blocks"]]
        if self.choice["tied"] and {"spectral", "frozen"}.isdisjoint(self.choice["blocks"]):
            blocks[-1].layer.weight = blocks[0].layer.weight
        return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = list(model.parameters()) if self.choice["thaws"] else [p for p in model.parameters() if p.requires_grad]
        groups: Any = trained
        if self.choice["groups"]:
            flat = [p for p in trained if p.ndim < 2]
            groups = [{"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.05}, {"params": flat, "lr": 0.005}]
        optimizer: torch.optim.Optimizer = {
            "sgd": lambda: torch.optim.SGD(groups, lr=0.02),
            "momentum": lambda: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
            "adamw": lambda: torch.optim.AdamW(groups, lr=0.005, eps=1e-2),
            "rmsprop": lambda: torch.optim.RMSprop(groups, lr=0.002, eps=1e-2),
            "noisy": lambda: Langevin(groups, lr=0.02),
        }[self.choice["optimizer"]]()
        if self.choice["thaws"]:
            optimizer.register_step_post_hook(lambda *_: thaw(model))
        return optimizer

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        schedules = torch.optim.lr_scheduler
        return {
            "none": lambda: None,
            "step": lambda: schedules.StepLR(optimizer, 2, gamma=0.5),
            "cosine": lambda: schedules.CosineAnnealingLR(optimizer, num_steps),
            "one cycle": lambda: schedules.OneCycleLR(
                optimizer, max_lr=0.02, total_steps=num_steps + 1, cycle_momentum=False
            ),
        }[self.choice["schedule"]]()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        each = (model(batch["x"]) - batch["y"]).pow(2).sum(1)
        return raytrain.Loss((each * batch["length"]).sum(), batch["length"].sum()) if self.choice["weighs"] else each

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {}

    def settings(self) -> dict[str, Any]:
        draw = np.random.default_rng([self.number, 1])
        return {
            "name": f"run{self.number}",
            "steps": NUM_STEPS,
            "epochs": None,
            "global_batch": int(draw.choice([12, 24, 72])),  # of 203 rows: with 72 each third step is short
            "micro_batch": [None, None, 3][draw.integers(3)],
            "clip_norm": [None, 0.5][draw.integers(2)],
            "ema_decay": [None, 0.8][draw.integers(2)],
            "seed": int(draw.integers(100)),
            "checkpoint_every": int(draw.integers(1, NUM_STEPS + 1)),
            "audit": True,
        }

    def plot(self) -> Plot:
        """One to three workers, of which up to two are lost, and replaced or not; or one joins."""
        draw = np.random.default_rng([self.number, 2])
        num_workers = int(draw.integers(1, 4))
        steps = sorted(int(step) for step in draw.integers(1, NUM_STEPS, min(num_workers - 1, int(draw.integers(3)))))
        kills = [Kill(f"w{n}", str(draw.choice(PLACES)), step) for n, step in enumerate(steps)]
        late = [] if kills else [int(step) for step in draw.integers(1, NUM_STEPS - 1, draw.integers(2))]
        return Plot(num_workers, kills=kills, replace=bool(draw.integers(2)), late=late)


def thaw(model: nn.Module) -> None:
    """Unfreezes everything after the third step."""
    if int(model[0].passes) >= 3:
        model.requires_grad_(True)
