"""What a user writes: the model, the data and the loss, as hooks of one class.

The worker calls the hooks, again for the same step if a peer is lost in the middle of it; so a hook must not keep a
state of its own between calls. Fields of the class are hyperparameters: typed, validated, on the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from raytrain.config import explain

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    Batch = dict[str, Any]


class Loss(NamedTuple):
    """A loss that is not one value per row, for example a sum over tokens.

    The gradient of a step is that of `sum over the global batch / weight over the global batch`.
    """

    sum: torch.Tensor
    """Scalar: the sum of the losses of this micro-batch."""
    weight: torch.Tensor | float
    """Scalar: how many things (tokens, say) were summed; must not depend on the parameters."""


class Task(BaseModel):
    """Base of the user's task. `data`, `model`, `optimizer` and `loss` are required, the others optional."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise explain(error, type(self)) from None

    def data(self) -> Mapping[str, Any]:
        """Sources by name: "train" is required, the others are evaluated on. Called once, in the driver."""
        raise NotImplementedError

    def model(self) -> torch.nn.Module:
        """The model, on the CPU, with its initial weights. The generators are seeded with the run's seed before."""
        raise NotImplementedError

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the model's parameters."""
        raise NotImplementedError

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> torch.optim.lr_scheduler.LRScheduler | None:
        """A learning rate schedule over `num_steps` optimizer steps, stepped once after each; None for none."""
        return None

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor | Loss:
        """The loss of a micro-batch: one value per row (shape [rows]), a `Loss(sum, weight)`, or a mean (scalar).

        A mean is weighted by the rows of the micro-batch.
        """
        raise NotImplementedError

    def metrics(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, torch.Tensor | Loss]:
        """Evaluation metrics of a micro-batch, each in one of the three forms that `loss` may have."""
        return {}

    def transform(self, batch: Batch) -> Batch:
        """Prepares rows on the CPU, off the training process where possible (Ray Data).

        Takes and returns numpy columns: {name: array of shape [rows, ...]}; must keep the number and order of rows.
        The generators of numpy, random and torch are seeded by the place of the rows before each call.
        """
        return batch
