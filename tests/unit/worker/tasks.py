"""Tasks for the tests of the worker: each has one edge. Importable, since worker processes need them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import raytrain
from tests.support.tasks import WIDTH, Regression


class Slope(raytrain.Task):
    """One weight without a bias; the gradient of each row's loss is 0.8, and a step of SGD with rate 1 subtracts it."""

    lengths: bool = False

    def data(self) -> dict[str, Any]:
        return {"train": raytrain.arrays(x=np.full((10, 1), 0.8, np.float32), length=np.arange(1, 11))}

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        each = model(batch["x"])[:, 0]
        return raytrain.Loss((each * batch["length"]).sum(), batch["length"].sum()) if self.lengths else each


class Cliff(Slope):
    """A loss of 0 whose gradient is not a number."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return (model(batch["x"])[:, 0] * 0).sqrt()


class Spare(nn.Module):
    """A model with a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(WIDTH, 1), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)  # type: ignore[no-any-return]

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)  # type: ignore[no-any-return]


class WithSpareLayer(Regression):
    """Its optimizer decays whatever has a gradient."""

    def model(self) -> nn.Module:
        return Spare()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.1)


class ByMethod(WithSpareLayer):
    """Goes around the model's forward, where gradients would not be reduced."""

    def loss(self, model: Any, batch: Any) -> Any:
        return (model.predict(batch["x"]) - batch["y"]).pow(2).sum(1)


class BrokenBackward(Regression):
    """Raises in the backward pass."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        output = model(batch["x"])
        output.register_hook(_raise)
        return (output - batch["y"]).pow(2).sum(1)


def _raise(gradient: torch.Tensor) -> torch.Tensor:
    raise ValueError("a wrong gradient")
