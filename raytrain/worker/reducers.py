"""How are gradients and buffers of the logical workers reduced over the ranks, and what does the user's loss call?

`DdpReducer` uses PyTorch's DDP: fast, and equal for all numbers of workers up to the order of floating-point sums.
`ExactReducer` is equal to the last bit. Both wrap the user's model; when passes happen, and what is done with the
gradients, is decided by `TrainStep`. Runs in the worker's training thread.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raytrain.config import RunConfig
from raytrain.errors import TaskError
from raytrain.rendezvous.health import WAITING
from raytrain.worker.bitwise import ExactSum
from raytrain.worker.group import Group, peer_loss
from raytrain.worker.heartbeat import HeartbeatSender
from raytrain.worker.state import TrainState

IN_LOSS = "in loss"
"""An activity of the training thread, besides those of `rendezvous.health`."""

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Reducer(Protocol):
    """Reduces the gradients of the steps of one generation. A step is `begin`, passes, `reduce`; repeated if that fails."""

    model: Any
    """What the user's loss calls; `num_calls` counts the calls."""

    @property
    def waits_in_backward(self) -> bool:
        """Whether the backward pass that begins now waits for the other ranks."""

    def loss_scale(self, planned_rows: int) -> float:
        """Factor of the loss sum of a micro-batch before its backward pass."""

    def begin(self) -> None:
        """The passes of a step begin, for the first time or again."""

    def begin_pass(self, is_final: bool) -> None:
        """A pass begins; `is_final`: the last one of this rank in the step."""

    def end_logical_worker(self) -> None:
        """The passes of one logical worker are done."""

    def idle_loss(self) -> torch.Tensor | None:
        """What a rank without rows in a short step calls backward on; None for nothing."""

    def reduce(self) -> bool:
        """Gives the parameters the gradients of all ranks; False if the passes must be repeated first."""

    def commit(self) -> None:
        """The step is committed."""

    def close(self) -> None:
        """The generation ends."""


def build_reducer(config: RunConfig, state: TrainState, group: Group, heartbeat: HeartbeatSender) -> Reducer:
    if config.exactness == "bitwise":
        return ExactReducer(config, state, heartbeat)
    return DdpReducer(config, state, group, heartbeat)


class DdpReducer:
    """Reduces during the last backward pass of a step."""

    def __init__(self, config: RunConfig, state: TrainState, group: Group, heartbeat: HeartbeatSender) -> None:
        self.model: Any = DDPWrapper(state.model, config.find_unused_parameters, heartbeat)
        self._user_model, self._num_ranks = state.model, group.size

    @property
    def waits_in_backward(self) -> bool:
        return bool(self.model.require_backward_grad_sync)

    def loss_scale(self, planned_rows: int) -> float:
        return self._num_ranks / planned_rows  # DDP divides by the number of ranks

    def begin(self) -> None:
        self.model.require_backward_grad_sync = False

    def begin_pass(self, is_final: bool) -> None:
        self.model.require_backward_grad_sync, self.model.num_calls = is_final, 0

    def end_logical_worker(self) -> None:
        """Nothing to do: the gradients of all passes add up in the parameters."""

    def idle_loss(self) -> torch.Tensor | None:
        self.model.require_backward_grad_sync = True
        loss: torch.Tensor = self.model(idle=True)
        return loss

    def reduce(self) -> bool:
        """Raises TaskError if DDP still waits for the gradients of some parameters, so that the ranks would diverge."""
        try:
            self.model._check_reducer_finalized()
        except RuntimeError as error:
            raise TaskError(_unused_parameters(self._user_model, str(error)), "loss") from None
        return True

    def commit(self) -> None:
        """Nothing is kept from one step to the next."""

    def close(self) -> None:
        """Drops DDP's reducer, so that its destructor does not run while the process group is destroyed.

        The destructor joins gloo's thread while it holds the GIL, which that thread may need to end a broken reduction
        (torch 2.13): a deadlock. `destroy_process_group` releases the GIL.
        """
        self.model.reducer = self.model.logger = None


class ExactReducer:
    """Sums integers after the passes; see `bitwise`."""

    waits_in_backward = False

    def __init__(self, config: RunConfig, state: TrainState, heartbeat: HeartbeatSender) -> None:
        self.model: Any = CallCounter(state.model)
        self._state, self._heartbeat = state, heartbeat
        trained = [p for p in state.model.parameters() if p.requires_grad]
        self._sum = ExactSum(trained, config.num_logical, state.exponents)

    def loss_scale(self, planned_rows: int) -> float:
        return 1 / planned_rows

    def begin(self) -> None:
        self._sum.begin()

    def begin_pass(self, is_final: bool) -> None:
        self.model.num_calls = 0

    def end_logical_worker(self) -> None:
        self._sum.collect()

    def idle_loss(self) -> torch.Tensor | None:
        return None

    def reduce(self) -> bool:
        self._heartbeat.set_activity(WAITING)
        return self._sum.reduce()

    def commit(self) -> None:
        self._state.exponents = list(self._sum.exponents)

    def close(self) -> None:
        """Nothing to release."""


class DDPWrapper(DistributedDataParallel):
    """DDP around the user's model that can reduce on a rank without rows, and forwards the model's own attributes."""

    def __init__(self, model: torch.nn.Module, find_unused_parameters: bool, heartbeat: HeartbeatSender) -> None:
        with warnings.catch_warnings():  # the name of this argument differs between the versions of torch that we allow
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(
                _IdleModel(model, find_unused_parameters),
                broadcast_buffers=False,
                init_sync=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=find_unused_parameters,
            )
        self.num_calls = 0
        self._heartbeat = heartbeat

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        """DDP's only collective in a forward pass is here: the agreement on its buckets in a group's second step."""
        self._heartbeat.set_activity(WAITING)
        with peer_loss():
            prepared = super()._pre_forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._heartbeat.set_activity(IN_LOSS)
        return prepared

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            idle_model: Any = super().__getattr__("module")
            return getattr(idle_model.model, name)


class CallCounter(torch.nn.Module):
    """The user's model, where no reduction happens in its passes: counts the calls and forwards the model's attributes."""

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


class _IdleModel(torch.nn.Module):
    """The model, or, for a rank without rows, a zero that depends on every parameter.

    If parameters may be unused, the zero depends on one parameter only: one that no rank uses must stay without a gradient,
    since an optimizer would decay it on a gradient of zero, but only with so many workers that one of them is idle.
    """

    def __init__(self, model: torch.nn.Module, find_unused_parameters: bool) -> None:
        super().__init__()
        self.model, self._find_unused_parameters = model, find_unused_parameters

    def forward(self, *args: Any, idle: bool = False, **kwargs: Any) -> Any:
        if not idle:
            return self.model(*args, **kwargs)
        trained = [p for p in self.model.parameters() if p.requires_grad][: 1 if self._find_unused_parameters else None]
        return torch.stack([(p.reshape(-1)[:1] * 0).sum() for p in trained]).sum()


class BufferReducer:
    """Buffers that a forward pass updates (BatchNorm statistics), made independent of the number of ranks.

    Each logical worker starts from the values at the beginning of the step; the results are averaged over the logical
    workers that had rows. Only persistent buffers take part; integers (num_batches_tracked) take the maximum.

    Args:
        model: the model whose buffers they are.
        num_terms: 1, or the number of logical workers: then each has a term of its own, and the terms are added in their
            order, a sum of floats that does not depend on the ranks, at `num_terms` times the memory.
    """

    def __init__(self, model: torch.nn.Module, num_terms: int = 1) -> None:
        self._num_terms = num_terms
        persistent = model.state_dict(keep_vars=True)
        buffers = [buffer for name, buffer in model.named_buffers() if name in persistent]
        self._averaged = [b for b in buffers if b.is_floating_point()]
        self._counters = [b for b in buffers if b.dtype in _INTEGERS]
        self._all = [*self._averaged, *self._counters]
        self._start: list[torch.Tensor] = []

    def begin(self) -> None:
        """Starts a step."""
        self._start = [b.detach().clone() for b in self._all]
        self._sums = [b.new_zeros((self._num_terms, *b.shape), dtype=torch.float64) for b in self._averaged]
        self._largest = [c.detach().clone() for c in self._counters]
        self._num_collected = 0

    def rewind(self) -> None:
        """Resets the model's buffers to the beginning of the step."""
        self.assign(self._start)

    def collect(self, logical: int) -> None:
        """Adds the values after the passes of a logical worker."""
        for sums, buffer in zip(self._sums, self._averaged, strict=True):
            sums[logical % self._num_terms] += buffer.detach()
        for largest, counter in zip(self._largest, self._counters, strict=True):
            torch.maximum(largest, counter, out=largest)
        self._num_collected += 1

    def reduce(self, group: Group) -> list[torch.Tensor]:
        """Returns the values after the step, over all ranks, for `assign`."""
        if not self._all:
            return []
        count = torch.tensor([float(self._num_collected)], dtype=torch.float64, device=group.device)
        flat = group.all_reduce(torch.cat([count, *(sums.reshape(-1) for sums in self._sums)]))
        parts = torch.split(flat[1:], [sums.numel() for sums in self._sums])
        totals = [part.view_as(sums).sum(0) for part, sums in zip(parts, self._sums, strict=True)]
        for largest in self._largest:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        means = [(total / flat[0]).to(buffer.dtype) for total, buffer in zip(totals, self._averaged, strict=True)]
        return [*means, *self._largest]

    def assign(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._all, values, strict=True):
                buffer.copy_(value)


def _unused_parameters(model: torch.nn.Module, message: str) -> str:
    """Names the parameters that got no gradient; DDP's message has their indices among the trained parameters."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    indices = re.search(r"did not receive grad for rank \d+: ((?:\d+ ?)+)", message)
    unused = ", ".join(names[int(index)] for index in indices[1].split()) if indices else "some parameters"
    return (
        f"the loss does not depend on {unused}; every parameter that is trained takes part in the last pass of each step, "
        "or run.find_unused_parameters is set (--run.find-unused-parameters)"
    )
