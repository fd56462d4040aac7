"""The training state in a worker's memory: built from the task, handed to newcomers, compared between peers.

Everything that a step changes is here, so that it can move as one: weights, optimizer, scheduler, step number, and what
was done at the last step boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from raytrain.checkpoint.state import Snapshot, restore, restore_bytes, snapshot
from raytrain.config import RunConfig
from raytrain.errors import ConfigError, RaytrainError, TaskError
from raytrain.rendezvous.state import NO_STATE
from raytrain.task import Task
from raytrain.worker.exact_sum import UNKNOWN
from raytrain.worker.group import Group, PeerLost
from raytrain.worker.hooks import seed_everything, user_code


class StateDiffers(RaytrainError):
    """The state that was handed to this worker is not what arrived: its process, or its machine, cannot be trusted."""


@dataclass
class Boundary:
    """What was done at a step boundary, so that a new leader neither repeats nor forgets it."""

    evaluated: int = NO_STATE
    """Finished steps at the last evaluation."""
    best_score: float | None = None
    best_step: int = NO_STATE
    """Finished steps at the best evaluation of this run."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last evaluation."""


@dataclass
class TrainState:
    """The state of a run; `step` counts finished steps, NO_STATE before there is any."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    step: int = NO_STATE
    boundary: Boundary = field(default_factory=Boundary)
    exponents: list[int] = field(default_factory=list)
    """Of the trained parameters' gradients, see `exact_sum`; empty where sums are not exact."""

    def snapshot(self) -> Snapshot:
        return snapshot(self.model, self.optimizer, self.scheduler, self.step, self.exponents)

    def restore(self, files: Mapping[str, bytes], keeps_settings: bool = False) -> None:
        """Takes the state of a checkpoint; see `checkpoint.state.restore`, also for what it raises."""
        self._take(*restore(files, self.model, self.optimizer, self.scheduler, keeps_settings))

    def take(self, data: bytes) -> None:
        """Takes the state that a peer has handed over."""
        self._take(*restore_bytes(data, self.model, self.optimizer, self.scheduler))

    def _take(self, step: int, exponents: list[int]) -> None:
        self.step = step
        if self.exponents and len(exponents) == len(self.exponents):  # of a run that had exact sums, too
            self.exponents = exponents

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def build_state(task: Task, config: RunConfig, num_steps: int, device: torch.device) -> TrainState:
    """The initial state, the same on every worker since it depends on the seed alone; its step is NO_STATE.

    Raises:
        TaskError: a hook raised, or returned something else.
        ConfigError: the model has nothing to train.
    """
    seed_everything(config.seed)
    with user_code("model"):
        model = task.model()
    _check_kind("model", model, torch.nn.Module)
    model = model.to(device)
    num_trained = sum(parameter.requires_grad for parameter in model.parameters())
    if not num_trained:
        rule = "has a parameter with requires_grad, since there is nothing to train otherwise"
        raise ConfigError(f"{type(task).__name__}.model", "no parameter that is trained", rule, "unfreeze a parameter")
    with user_code("optimizer"):
        optimizer = task.optimizer(model)
    _check_kind("optimizer", optimizer, torch.optim.Optimizer)
    with user_code("scheduler"):
        scheduler = task.scheduler(optimizer, num_steps)
    exponents = [UNKNOWN] * num_trained if config.exactness == "bitwise" else []
    return TrainState(model, optimizer, scheduler, exponents=exponents)


def _check_kind(hook: str, answer: object, kind: type) -> None:
    if not isinstance(answer, kind):
        raise TaskError(f"{hook} returned {type(answer).__name__}; it returns a {kind.__module__}.{kind.__name__}", hook)


def synchronise(state: TrainState, group: Group) -> None:
    """Gives every rank the leader's state, and proves that they are equal afterwards.

    Nothing is sent where all ranks have the same state already, as after the loss of a peer. Ranks at the same step can
    differ in last bits: one that was left out, alive but out of reach, has taken its last step in another group.

    Raises:
        StateDiffers: this rank's state is another one than the leader's after that.
        PeerLost: that of another rank is, which will not train with the others.
    """
    boundary = group.share(state.boundary)
    if not _agree(group, (state.step, digest(state))):
        data = group.share(state.snapshot().to_bytes() if group.leads else None)
        if not group.leads:
            state.take(data)
        digests = group.gather(digest(state))
        if digests[group.rank] != digests[0]:
            raise StateDiffers(f"after step {state.step} was handed over, this worker's state is not the leader's")
        if any(other != digests[0] for other in digests):
            raise PeerLost(f"the state of another worker differs after step {state.step} was handed over")
    state.boundary = boundary


def _agree(group: Group, value: object) -> bool:
    values = group.gather(value)
    return all(other == values[0] for other in values)


def digest(state: TrainState) -> tuple[int, int]:
    """Two 64-bit sums over the bits of the weights and of the optimizer's tensors; equal states have equal digests."""
    sums = torch.zeros(2, dtype=torch.int64)
    for number, tensor in enumerate(_tensors(state)):
        bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
        words = bits.view(torch.int32) if bits.numel() % 4 == 0 else bits
        total = words.sum(dtype=torch.int64).cpu()
        sums += torch.stack([total, total * (2 * number + 1)])
    return int(sums[0]), int(sums[1])


def _tensors(state: TrainState) -> Iterator[torch.Tensor]:
    yield from state.model.state_dict().values()
    yield torch.tensor(state.exponents, dtype=torch.int64)
    for slots in state.optimizer.state_dict()["state"].values():
        yield from (value for value in _values(slots) if isinstance(value, torch.Tensor))


def _values(slots: Any) -> list[Any]:
    return list(slots.values()) if isinstance(slots, dict) else []
