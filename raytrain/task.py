"""What a user writes: the model, the data and the loss, as hooks of one class.

Workers call the hooks, and call them again for the same step after a peer was lost in the middle of it; so a hook must
not keep state between calls. Fields of the class are hyperparameters: typed, validated, and flags of the command line.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raytrain.config import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    Batch = dict[str, Any]


class Loss(NamedTuple):
    """A loss that is not one value per row, for example a sum over tokens.

    The gradient of a step is that of `sum / weight`, both summed over the global batch.
    """

    sum: torch.Tensor
    """Scalar: the summed loss of this micro-batch."""
    weight: torch.Tensor | float
    """Scalar: the number of summed items (for example tokens); must not depend on the parameters."""


class Sum(NamedTuple):
    """A metric that is added up over all rows, from which `summarise` computes what is reported."""

    value: torch.Tensor | float
    """The sum over the rows of this micro-batch, of any shape: for example a count, or counts by class."""


class Task(Settings):
    """Base class of a user's task. `data`, `model`, `optimizer` and `loss` are required, the other hooks optional."""

    def data(self) -> Mapping[str, Any]:
        """Sources by name: "train" is required, all others are evaluated on. Called once, in the driver.

        A source is what `raytrain.arrays`, `raytrain.parquet` or `raytrain.dataset` return, or what these stand for: a
        dictionary of columns, a pandas DataFrame, or a map-style dataset of PyTorch or Hugging Face. Batches, shuffling
        and workers' shares are made by raytrain, so a DataLoader, a sampler or an iterable is refused.

        Random numbers that `__getitem__` of a dataset draws from torch, numpy.random or random follow from the run's
        seed, the epoch and the row: a row is augmented alike on any worker, differently in each epoch of the training,
        and alike in each evaluation.
        """
        raise NotImplementedError

    def model(self) -> torch.nn.Module:
        """The model on the CPU, with its initial weights. All random generators are seeded with the run's seed before."""
        raise NotImplementedError

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer | Sequence[torch.optim.Optimizer]:
        """The optimizer of the model's parameters, or several of disjoint parameters; each is stepped once per step.

        An optimizer whose `step` needs a closure, such as LBFGS, is refused.
        """
        raise NotImplementedError

    def scheduler(
        self, optimizer: torch.optim.Optimizer, num_steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler | Mapping[str, Any] | None:
        """A learning rate schedule over `num_steps` optimizer steps, stepped after each one; None for a constant rate.

        A ReduceLROnPlateau is stepped after each evaluation, with the metric of `run.best`. A dict as in Lightning,
        {"scheduler": ..., "interval": "epoch" (default) or "step", "frequency": n}, steps it every n epochs or steps; its
        "monitor" names another metric for a ReduceLROnPlateau. Several optimizers come as one, with the groups of all.
        """
        return None

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor | Loss:
        """The loss of a micro-batch: one value per row (shape [rows]), a `Loss(sum, weight)`, or a mean (scalar).

        A mean is weighted by the number of rows of the micro-batch.
        """
        raise NotImplementedError

    def metrics(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Evaluation metrics of a micro-batch by name.

        A metric that is a mean over rows has one of the three forms of `loss`. All others are a `Sum`, see `summarise`, or a
        torchmetrics object that was updated with the rows of this micro-batch; its state is taken, and it is reset.
        A scalar that is not the mean over the rows, such as an F1 score, is refused.
        """
        return {}

    def summarise(self, sums: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        """The values to report, one number per name, from each `Sum` added up over all rows of a source.

        Args:
            sums: float64 tensors on the CPU, by the names that `metrics` gave them.
        """
        return sums

    def transform(self, batch: Batch) -> Batch:
        """Prepares rows on the CPU, outside of the training process where possible (Ray Data).

        Takes and returns numpy columns: {name: array of shape [rows, ...]}; must keep the number and order of rows.
        The generators of numpy, random and torch are seeded by the position of the rows before each call. Other
        generators, such as `np.random.default_rng()`, are not: the result of a run would depend on its workers.
        """
        return batch


def pickle_by_value(task: object) -> None:
    """Makes Ray's pickle send the code of a task's module along with the task, since workers may not find the file.

    Installed packages are not sent, and neither is raytrain: workers have them. `__main__` is sent in any case.

    Args:
        task: a task, its class, or a function that makes one.
    """
    name = task.__module__ if hasattr(task, "__qualname__") else type(task).__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or name == "__main__" or name.partition(".")[0] == "raytrain":
        return
    installed = {sysconfig.get_path(key) for key in ("purelib", "platlib", "stdlib")}
    if not any(Path(file).is_relative_to(path) for path in installed):
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(sys.modules[name])
