"""How are gradients of the logical workers reduced over the ranks, and what does the user's loss call?

`DdpReducer` uses PyTorch's DDP: fast, and equal for all numbers of workers up to the order of floating-point sums.
`PresentReducer` is for steps in which parameters may be unused. `ExactReducer` is equal to the last bit. All wrap the
user's model; when passes happen, and what is done with the gradients, is decided by `TrainStep`. Each reduces the
parameters that are trained when it is made. Runs in the worker's training thread.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raytrain.config import RunConfig
from raytrain.errors import TaskError
from raytrain.rendezvous.health import WAITING
from raytrain.worker.bitwise import ExactSum
from raytrain.worker.failures import peer_loss
from raytrain.worker.group import Group
from raytrain.worker.heartbeat import HeartbeatSender
from raytrain.worker.state import TrainState

IN_LOSS = "in loss"
"""An activity of the training thread, besides those of `rendezvous.health`."""

BUCKET_BYTES = 25 << 20
"""Bytes of gradients per all-reduce after the backward pass; DDP's default."""


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

    def end_step(self, applied: bool) -> None:
        """The step is committed; `applied`: False if it was skipped."""

    def close(self) -> None:
        """The generation ends."""


def build_reducer(config: RunConfig, state: TrainState, group: Group, heartbeat: HeartbeatSender) -> Reducer:
    if config.exactness == "bitwise":
        return ExactReducer(config, state, group, heartbeat)
    if config.find_unused_parameters:
        return PresentReducer(state, group, heartbeat)
    return DdpReducer(state, group, heartbeat)


class DdpReducer:
    """Reduces during the last backward pass of a step."""

    def __init__(self, state: TrainState, group: Group, heartbeat: HeartbeatSender) -> None:
        self.model: Any = DDPWrapper(state, heartbeat)
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

    def end_step(self, applied: bool) -> None:
        """Nothing is kept from one step to the next."""

    def close(self) -> None:
        """Drops DDP's reducer, so that its destructor does not run while the process group is destroyed.

        The destructor joins gloo's thread while it holds the GIL, which that thread may need to end a broken reduction
        (torch 2.13): a deadlock. `destroy_process_group` releases the GIL.
        """
        self.model.reducer = self.model.logger = None


class PresentReducer:
    """Sums after the passes, over the gradients that some rank has: one that no rank has stays none."""

    waits_in_backward = False

    def __init__(self, state: TrainState, group: Group, heartbeat: HeartbeatSender) -> None:
        self.model: Any = CallCounter(state)
        self._group, self._heartbeat = group, heartbeat
        self._trained = [p for p in state.model.parameters() if p.requires_grad]

    def loss_scale(self, planned_rows: int) -> float:
        return 1 / planned_rows

    def begin(self) -> None:
        """Nothing to do: the gradients are none."""

    def begin_pass(self, is_final: bool) -> None:
        self.model.num_calls = 0

    def end_logical_worker(self) -> None:
        """Nothing to do: the gradients of all passes add up in the parameters."""

    def idle_loss(self) -> torch.Tensor | None:
        return None

    @torch.no_grad()
    def reduce(self) -> bool:
        self._heartbeat.set_activity(WAITING)
        device = self._trained[0].device
        present = torch.tensor([p.grad is not None for p in self._trained], dtype=torch.float32, device=device)
        self._group.all_reduce(present)
        gradients = [_dense(p) for p, count in zip(self._trained, present.tolist(), strict=True) if count]
        buckets = [(bucket, torch.cat([gradient.reshape(-1) for gradient in bucket])) for bucket in _buckets(gradients)]
        for reduction in [dist.all_reduce(flat, async_op=True) for _, flat in buckets]:
            reduction.wait()
        for bucket, flat in buckets:
            parts = torch.split(flat, [gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])
        return True

    def end_step(self, applied: bool) -> None:
        """Nothing is kept from one step to the next."""

    def close(self) -> None:
        """Nothing to release."""


class ExactReducer:
    """Sums integers after the passes; see `bitwise`."""

    waits_in_backward = False

    def __init__(self, config: RunConfig, state: TrainState, group: Group, heartbeat: HeartbeatSender) -> None:
        self.model: Any = CallCounter(state)
        self._state, self._group, self._heartbeat = state, group, heartbeat
        parameters = list(state.model.parameters())
        self._numbers = [number for number, parameter in enumerate(parameters) if parameter.requires_grad]
        trained = [parameters[number] for number in self._numbers]
        self._sum = ExactSum(trained, config.num_logical, self._own_exponents())

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
        return self._sum.reduce(self._group.synchronize)

    def end_step(self, applied: bool) -> None:
        """A step that is skipped leaves the exponents as they were, whatever its repetitions have set."""
        if not applied:
            self._sum.exponents = self._own_exponents()
        for number, exponent in zip(self._numbers, self._sum.exponents, strict=True):
            self._state.exponents[number] = exponent

    def _own_exponents(self) -> list[int]:
        return [self._state.exponents[number] for number in self._numbers]

    def close(self) -> None:
        """Nothing to release."""


class DDPWrapper(DistributedDataParallel):
    """DDP around the user's model that can reduce on a rank without rows, and forwards the model's own attributes."""

    def __init__(self, state: TrainState, heartbeat: HeartbeatSender) -> None:
        with warnings.catch_warnings():  # the name of this argument differs between the versions of torch that we allow
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(_IdleModel(state), broadcast_buffers=False, init_sync=False, gradient_as_bucket_view=True)
        self.num_calls = 0
        self._heartbeat = heartbeat

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        """DDP's only collective in a forward pass is here: the agreement on its buckets in a group's second step."""
        with self._heartbeat.waiting(), peer_loss():
            return super()._pre_forward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            idle_model: Any = super().__getattr__("module")
            return getattr(idle_model.model, name)

    def __getitem__(self, key: Any) -> Any:
        idle_model: Any = self.module
        return idle_model.model[key]


class CallCounter(torch.nn.Module):
    """The user's model, where no reduction happens in its passes: counts the calls and forwards the model's attributes."""

    def __init__(self, state: TrainState) -> None:
        super().__init__()
        self.model, self._state = state.model, state
        self.num_calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return self._state.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model: Any = super().__getattr__("model")
            return getattr(model, name)

    def __getitem__(self, key: Any) -> Any:
        model: Any = self.model
        return model[key]


class _IdleModel(torch.nn.Module):
    """The model, or, for a rank without rows, a zero that depends on every parameter that is trained."""

    def __init__(self, state: TrainState) -> None:
        super().__init__()
        self.model, self._state = state.model, state

    def forward(self, *args: Any, idle: bool = False, **kwargs: Any) -> Any:
        if not idle:
            return self._state.forward(*args, **kwargs)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return sum((p.reshape(-1)[:1] * 0).sum() for p in trained)


def _dense(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's gradient, dense, and zero where this rank has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.layout != torch.strided:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Gradients of one dtype each, in order, of about `BUCKET_BYTES`."""
    for _, group in itertools.groupby(gradients, key=lambda gradient: gradient.dtype):
        bucket: list[torch.Tensor] = []
        for gradient in group:
            bucket.append(gradient)
            if sum(g.nbytes for g in bucket) >= BUCKET_BYTES:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


def _unused_parameters(model: torch.nn.Module, message: str) -> str:
    """Names the parameters that got no gradient; DDP's message has their indices among the trained parameters."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    indices = re.search(r"did not receive grad for rank \d+: ((?:\d+ ?)+)", message)
    unused = ", ".join(names[int(index)] for index in indices[1].split()) if indices else "some parameters"
    return (
        f"the loss does not depend on {unused}; every parameter that is trained takes part in the last pass of each step, "
        "or run.find_unused_parameters is set (--run.find-unused-parameters)"
    )
