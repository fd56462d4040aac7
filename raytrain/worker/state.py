"""The training state in a worker's memory: built from the task, restored, broadcast to newcomers, compared between ranks.

Everything that a step changes is here, so that it changes together: weights, optimizer, scheduler, step number, and the
latest evaluation. Runs in the worker's training thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from raytrain.checkpoint.manifest import CLONED_FROM, best_of
from raytrain.checkpoint.state import Snapshot, restore, restore_bytes, snapshot
from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import parse_best
from raytrain.errors import ConfigError, RaytrainError, TaskError
from raytrain.rendezvous.state import NO_STATE
from raytrain.worker.bitwise import UNKNOWN
from raytrain.worker.context import RunSpec
from raytrain.worker.group import Group, PeerLost
from raytrain.worker.hooks import seed_everything, user_code


class StateMismatch(RaytrainError):
    """This worker's state is not the one that the leader sent: its process, or its machine, cannot be trusted."""


@dataclass
class EvaluationState:
    """The latest and the best evaluation, so that a new leader neither repeats nor forgets them."""

    step: int = NO_STATE
    """Finished steps at the latest evaluation."""
    best_score: float | None = None
    best_step: int = NO_STATE
    """Finished steps at the best evaluation of this run."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The latest evaluation."""


@dataclass
class TrainState:
    """The state of a run; `step` counts finished steps, NO_STATE before there is any."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    step: int = NO_STATE
    evaluation: EvaluationState = field(default_factory=EvaluationState)
    exponents: list[int] = field(default_factory=list)
    """Of the trained parameters' gradients, see `bitwise`; empty in default mode."""

    def snapshot(self) -> Snapshot:
        return snapshot(self.model, self.optimizer, self.scheduler, self.step, self.exponents)

    def load_checkpoint(self, files: Mapping[str, bytes], keeps_settings: bool = False) -> None:
        """Loads a checkpoint; see `checkpoint.state.restore`, also for the errors."""
        self._set(*restore(files, self.model, self.optimizer, self.scheduler, keeps_settings))

    def load_bytes(self, data: bytes) -> None:
        """Loads the state that a peer has sent."""
        self._set(*restore_bytes(data, self.model, self.optimizer, self.scheduler))

    def _set(self, step: int, exponents: list[int]) -> None:
        self.step = step
        if self.exponents and len(exponents) == len(self.exponents):  # saved in bitwise mode, too
            self.exponents = exponents

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def build_state(spec: RunSpec, device: torch.device) -> TrainState:
    """The initial state, the same on every worker since it depends on the seed alone; its step is NO_STATE.

    Raises:
        TaskError: a hook raised, or returned something of another type.
        ConfigError: the model has no parameter to train.
    """
    task, config = spec.task, spec.config
    seed_everything(config.seed)
    with user_code("model"):
        model = task.model()
    _check_type("model", model, torch.nn.Module)
    model = model.to(device)
    num_trained = sum(parameter.requires_grad for parameter in model.parameters())
    if not num_trained:
        rule = "has a parameter with requires_grad, since there is nothing to train otherwise"
        raise ConfigError(f"{type(task).__name__}.model", "no parameter that is trained", rule, "unfreeze a parameter")
    with user_code("optimizer"):
        optimizer = task.optimizer(model)
    _check_type("optimizer", optimizer, torch.optim.Optimizer)
    with user_code("scheduler"):
        scheduler = task.scheduler(optimizer, spec.num_steps)
    exponents = [UNKNOWN] * num_trained if config.exactness == "bitwise" else []
    return TrainState(model, optimizer, scheduler, exponents=exponents)


def restore_newest(state: TrainState, store: CheckpointStore, best: str) -> str:
    """Loads the newest verified checkpoint into `state`; step 0 if there is none.

    Returns:
        the checkpoint's name, or "" for initial weights.
    """
    checkpoint = store.newest_verified()
    if checkpoint is None:
        state.step = 0
        return ""
    files = {name: store.read(checkpoint, name) for name in checkpoint.manifest.files}
    state.load_checkpoint(files, keeps_settings=CLONED_FROM in checkpoint.manifest.run)
    metrics = dict(checkpoint.manifest.metrics)
    state.evaluation = EvaluationState(state.step if metrics else NO_STATE, _best_score(store, best), metrics=metrics)
    return checkpoint.name


def broadcast_state(state: TrainState, group: Group) -> None:
    """Gives every rank the leader's state, and verifies that they are equal afterwards.

    Sends nothing if all ranks have the same state already, as after the loss of a peer. Ranks at the same step can differ in
    their last bits: one that was cut off, but alive, has taken its last step in another group.

    Raises:
        StateMismatch: this rank's state differs from the leader's afterwards.
        PeerLost: another rank's state does; that rank will not train with the others.
    """
    evaluation = group.broadcast_object(state.evaluation)
    if not _all_equal(group, (state.step, checksum(state))):
        data = group.broadcast_object(state.snapshot().to_bytes() if group.is_leader else None)
        if not group.is_leader:
            state.load_bytes(data)
        checksums = group.all_gather_object(checksum(state))
        if checksums[group.rank] != checksums[0]:
            raise StateMismatch(f"after the broadcast of step {state.step}, this worker's state is not the leader's")
        if any(other != checksums[0] for other in checksums):
            raise PeerLost(f"the state of another worker differs after the broadcast of step {state.step}")
    state.evaluation = evaluation


def checksum(state: TrainState) -> tuple[int, int]:
    """Two 64-bit sums over the bits of the weights and of the optimizer's tensors; equal states have equal checksums."""
    sums = torch.zeros(2, dtype=torch.int64)
    for number, tensor in enumerate(_tensors(state)):
        bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
        words = bits.view(torch.int32) if bits.numel() % 4 == 0 else bits
        total = words.sum(dtype=torch.int64).cpu()
        sums += torch.stack([total, total * (2 * number + 1)])
    return int(sums[0]), int(sums[1])


def _check_type(hook: str, value: object, expected: type) -> None:
    if not isinstance(value, expected):
        wanted = f"{expected.__module__}.{expected.__name__}"
        raise TaskError(f"{hook} returned {type(value).__name__}; it returns a {wanted}", hook)


def _best_score(store: CheckpointStore, best: str) -> float | None:
    checkpoint = best_of(store.list(), best)
    score = checkpoint.manifest.metrics.get(parse_best(best)[1], math.nan) if checkpoint else math.nan
    return float(score) if math.isfinite(score) else None


def _all_equal(group: Group, value: object) -> bool:
    values = group.all_gather_object(value)
    return all(other == values[0] for other in values)


def _tensors(state: TrainState) -> Iterator[torch.Tensor]:
    yield from state.model.state_dict().values()
    yield torch.tensor(state.exponents, dtype=torch.int64)
    for slots in state.optimizer.state_dict()["state"].values():
        values: list[Any] = list(slots.values()) if isinstance(slots, dict) else []
        yield from (value for value in values if isinstance(value, torch.Tensor))
