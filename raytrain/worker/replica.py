"""What the user's loss calls in place of the model: it looks like the model, and counts. In the worker.

It takes no steps; when its gradients are reduced, and by what they are scaled, is the business of stepper and reducer.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from raytrain.rendezvous.vitals import WAITING
from raytrain.worker.group import peer_loss
from raytrain.worker.pulse import Pulse

IN_LOSS = "in loss"
"""A place of the training thread, besides those of `rendezvous.vitals`."""


class Replica(DistributedDataParallel):
    """DDP around the user's model that also takes part in a reduction without rows, and shows the model's own methods."""

    def __init__(self, model: torch.nn.Module, find_unused_parameters: bool, pulse: Pulse) -> None:
        with warnings.catch_warnings():  # the name of this argument changes between the versions of torch that we allow
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(
                _Idle(model, find_unused_parameters),
                broadcast_buffers=False,
                init_sync=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=find_unused_parameters,
            )
        self.num_calls = 0
        self._pulse = pulse

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        """DDP's only collective in a forward pass, the agreement on its buckets in a group's second step, is here."""
        self._pulse.mark(WAITING)
        with peer_loss():
            prepared = super()._pre_forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._pulse.mark(IN_LOSS)
        return prepared

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            idle: Any = super().__getattr__("module")
            return getattr(idle.model, name)


class Counted(torch.nn.Module):
    """The user's model where nobody reduces in its passes: counts the calls, and shows the model's own methods."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.num_calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model: Any = super().__getattr__("model")
            return getattr(model, name)


class _Idle(torch.nn.Module):
    """The model, or, for a rank without rows, a zero that depends on every parameter.

    Where parameters may be unused it depends on one only: a parameter that no rank uses must stay without a gradient, since
    a gradient of zero would let an optimizer decay it, but only with so many workers that one of them is idle.
    """

    def __init__(self, model: torch.nn.Module, may_be_unused: bool) -> None:
        super().__init__()
        self.model, self._may_be_unused = model, may_be_unused

    def forward(self, *args: Any, idle: bool = False, **kwargs: Any) -> Any:
        if not idle:
            return self.model(*args, **kwargs)
        trained = [p for p in self.model.parameters() if p.requires_grad][: 1 if self._may_be_unused else None]
        return torch.stack([(p.reshape(-1)[:1] * 0).sum() for p in trained]).sum()
