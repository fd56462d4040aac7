"""What people bring: models, optimizers and habits, each with one thing that made results depend on workers elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import raytrain
from tests.support.tasks import WIDTH, Regression, WithBatchNorm


def net(*middle: nn.Module, last: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 24), *(middle or [nn.Tanh()]), last or nn.Linear(24, 1))


class Hooked(Regression):
    """Calls `after_step` of the model after each optimizer step."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr / 5, momentum=0.9, weight_decay=0.01)
        if hasattr(model, "after_step"):
            optimizer.register_step_post_hook(lambda *_: model.after_step())
        return optimizer


class Thawing(nn.Module):
    """Freezes the last layer and unfreezes the first after the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.net[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def after_step(self) -> None:
        self.steps += 1
        if self.steps == 3:
            self.net[0].requires_grad_(True)
            self.net[2].requires_grad_(False)


class Unfreezing(Hooked):
    def model(self) -> nn.Module:
        return Thawing()


class Averaging(nn.Module):
    """Keeps an average of its weights, as torch.optim.swa_utils does it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(nn.BatchNorm1d(24), nn.ReLU())
        self.average = torch.optim.swa_utils.AveragedModel(self.net).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def after_step(self) -> None:
        self.average.update_parameters(self.net)


class WithAverage(Hooked):
    def model(self) -> nn.Module:
        return Averaging()


class FrozenNorm(WithBatchNorm):
    def model(self) -> nn.Module:
        model = net(nn.BatchNorm1d(24), nn.ReLU())
        model[1].running_mean.fill_(5.0)
        model[1].eval()
        return model


class OwnStatistics(nn.Module):
    """Moving averages of its own, not in the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return self.net(x - self.mean)


class NotPersistent(Regression):
    def model(self) -> nn.Module:
        return OwnStatistics()


class Sometimes(nn.Module):
    """A layer that no row uses, and one that some rows use, in some passes only."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.never, self.rare = net(), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        chosen = x[:, 3] > 1.3
        return out + (self.rare(x) * chosen[:, None] if bool(chosen.any()) else 0.0)


class Unused(Hooked):
    def model(self) -> nn.Module:
        return Sometimes()


class HeadOnly(Regression):
    """The optimizer has the head only, while the rest has gradients, too."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[2].parameters(), lr=self.lr, momentum=0.9)


class Langevin(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class Noisy(Regression):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Langevin(model.parameters(), lr=self.lr / 5)


class SpectralNorm(Regression):
    def model(self) -> nn.Module:
        return net(last=nn.utils.parametrizations.spectral_norm(nn.Linear(24, 1)))


class Tied(Regression):
    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        model[2].weight = model[0].weight
        return model


class CumulativeNorm(WithBatchNorm):
    def model(self) -> nn.Module:
        return net(nn.BatchNorm1d(24, momentum=None), nn.ReLU())


class Lazy(WithBatchNorm):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(24), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(1))


class Rotating(nn.Module):
    """Complex weights, and a buffer without memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.register_buffer("scale", torch.full((1,), 0.5).expand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net((x * self.scale * self.phase).abs() ** 2)


class Complex(Regression):
    def model(self) -> nn.Module:
        return Rotating()


class Looked(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.net, self.words = net(), nn.Embedding(10, WIDTH, sparse=sparse)

    def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return self.net(x + self.words(length))


class Sparse(Regression):
    def model(self) -> nn.Module:
        return Looked(sparse=True)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return (model(batch["x"], batch["length"]) - batch["y"]).pow(2).sum(1)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {}


class NineRows(Regression):
    """With batches of 8, one of two workers has no rows in the second step, in which DDP agrees on its buckets."""

    def data(self) -> dict[str, Any]:
        whole = super().data()["train"]
        return {"train": raytrain.arrays(**whole.take(np.arange(9)))}


KEPT: dict[str, tuple[raytrain.Task, dict[str, Any]]] = {
    "parameters frozen and unfrozen by a hook": (Unfreezing(), {}),
    "an AveragedModel updated by a hook": (WithAverage(), {}),
    "BatchNorm left in eval mode": (FrozenNorm(lr=0.02), {}),
    "BatchNorm with a cumulative average": (CumulativeNorm(lr=0.02), {}),
    "statistics that are not persistent": (NotPersistent(), {}),
    "layers that rows use at times or never": (Unused(), {"find_unused_parameters": True}),
    "an optimizer of the head only": (HeadOnly(), {}),
    "noise drawn in the optimizer": (Noisy(), {}),
    "spectral norm": (SpectralNorm(), {}),
    "tied weights with ema_decay": (Tied(), {"ema_decay": 0.9}),
    "lazy modules": (Lazy(lr=0.02), {}),
    "complex weights and an expanded buffer": (Complex(), {}),
    "a sparse embedding without clipping": (Sparse(), {"clip_norm": None}),
}
"""Tasks that give the same result for any number of workers, with the settings that they need."""
ONLY_DEFAULT = {"a sparse embedding without clipping"}
