"""The training state in a worker's memory: built from the task, restored, and copied.

Everything that a step changes is here, so that it changes together: weights, optimizer, scheduler, step number, and the
latest evaluation. Runs in the worker's training thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raytrain.checkpoint.manifest import CLONED_FROM, best_of
from raytrain.checkpoint.state import HostMemory, Restored, Snapshot, live_state, load_live_state, restore, snapshot
from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import parse_best
from raytrain.data.loader import Batch, to_tensors
from raytrain.data.reading import first_rows
from raytrain.errors import ResumeError, TaskError
from raytrain.events.kinds import StateRestored
from raytrain.rendezvous.state import NO_STATE
from raytrain.worker.bitwise import UNKNOWN, deterministic_kernels_only
from raytrain.worker.buffers import buffer_places, is_persistent, read, write
from raytrain.worker.context import RunSpec
from raytrain.worker.hooks import as_sum, autocast, on_device, own_transform, seed_everything, user_code
from raytrain.worker.lr_schedule import LRSchedule, build_lr_schedule
from raytrain.worker.model import (
    Ema,
    check_model,
    check_optimizer,
    kept_in_eval_mode,
    materialize,
    modes_of,
    set_modes,
    set_trained,
    trained_names,
)
from raytrain.worker.optimizers import build_optimizer


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
    schedule: LRSchedule | None
    step: int = NO_STATE
    evaluation: EvaluationState = field(default_factory=EvaluationState)
    exponents: list[int] = field(default_factory=list)
    """Of the parameters' gradients, see `bitwise`; empty in default mode."""
    ema: Ema | None = None
    last_applied: tuple[int, float] = (NO_STATE, math.nan)
    """Finished steps after the latest step that was not skipped, and its loss."""
    written_buffers: list[str] = field(default_factory=list)
    """Those that a pass writes; known after the warm-up, and the same on all workers."""
    notes: list[str] = field(default_factory=list)
    """What the user is told when the run starts."""
    is_partial: bool = False
    """Whether only some of a peer's tensors have arrived in it, so that it has to be built anew."""
    forward: torch.nn.Module = field(init=False)
    """What a call of the model runs: the model, compiled once in the life of this process where `run.compile` is set."""

    def __post_init__(self) -> None:
        self.forward = self.model
        self._modes = modes_of(self.model)
        self._host_memory = HostMemory()
        self._trained_at_start = trained_names(self.model)

    def set_train_mode(self) -> None:
        set_modes(self.model, self._modes)

    def clear_gradients(self) -> None:
        """Also those of parameters that no optimizer has."""
        for parameter in self.model.parameters():
            parameter.grad = None

    @property
    def scheduler(self) -> Any:
        """The scheduler of `schedule`, or None."""
        return self.schedule.scheduler if self.schedule else None

    def snapshot(self) -> Snapshot:
        return snapshot(self.model, self.optimizer, self.scheduler, self.step, *self._rest(), self._host_memory)

    def live(self) -> dict[str, Any]:
        """Nested plain values with the live tensors, for `load_live` of a peer."""
        return live_state(self.model, self.optimizer, self.scheduler, self.step, *self._rest())

    def load_checkpoint(self, files: Mapping[str, bytes], keeps_settings: bool = False) -> None:
        """Loads a checkpoint; see `checkpoint.state.restore`, also for the errors."""
        self._set(restore(files, self.model, self.optimizer, self.scheduler, keeps_settings), keeps_settings)
        if keeps_settings and self.schedule:
            self.schedule.advance_to(self.step)

    def load_live(self, state: Mapping[str, Any]) -> None:
        """Loads the state that a peer has sent."""
        self._set(load_live_state(state, self.model, self.optimizer, self.scheduler))

    def _rest(self) -> tuple[dict[str, Any], Mapping[str, torch.Tensor] | None]:
        """What belongs to the state besides model, optimizer, scheduler and step; and the averaged weights."""
        places = buffer_places(self.model)
        extra = {
            "exponents": self.exponents,
            "last_applied": list(self.last_applied),
            "trained": {"at_start": self._trained_at_start, "now": trained_names(self.model)},
            "buffers": {name: read(places[name]) for name in self.written_buffers if not is_persistent(places[name])},
        }
        return extra, self.ema.values() if self.ema else None

    def _set(self, restored: Restored, keeps_settings: bool = False) -> None:
        """Sets what belongs to the state besides model, optimizer and scheduler.

        Raises:
            ResumeError: other parameters are trained, or there is no average of the weights to go on with.
        """
        self.step, extra = restored.step, restored.extra
        if self.exponents and extra["exponents"]:  # saved in bitwise mode, too
            self.exponents = list(extra["exponents"])
        applied_at, loss = extra["last_applied"]
        self.last_applied = (int(applied_at), float(loss))
        if not keeps_settings:
            saved = extra["trained"]["at_start"]
            if changed := sorted(set(saved) ^ set(self._trained_at_start)):
                rule = "the parameters with requires_grad at the start are those of the run"
                fix = "restore requires_grad in model(), or choose another run.name"
                raise ResumeError("model", f"frozen or unfrozen: {', '.join(changed[:3])}", rule, fix)
            set_trained(self.model, extra["trained"]["now"])
        places = buffer_places(self.model)
        for name, value in extra["buffers"].items():
            if name in places:
                write(places[name], value)
        if self.ema and restored.ema:
            self.ema.load(restored.ema)
        elif self.ema:
            rule, fix = "the checkpoint has averaged weights", "leave run.ema_decay out, or choose another run.name"
            raise ResumeError("run.ema_decay", "set", rule, fix)

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
    materialize(model, lambda: Sample(spec, device).run_pass(model))
    check_model(model, f"{type(task).__name__}.model")
    with user_code("optimizer"):
        returned = task.optimizer(model)
    optimizer = build_optimizer(f"{type(task).__name__}.optimizer", returned)
    left_out = check_optimizer(model, optimizer)
    with user_code("scheduler"):
        scheduler = task.scheduler(optimizer, spec.num_steps)
    where, per_epoch = f"{type(task).__name__}.scheduler", spec.plan.steps_per_epoch
    schedule = build_lr_schedule(where, scheduler, optimizer, config, per_epoch, spec.eval_names)
    exponents = [UNKNOWN] * len(list(model.parameters())) if config.exactness == "bitwise" else []
    ema = Ema(model, config.ema_decay) if config.ema_decay is not None else None
    state = TrainState(model, optimizer, schedule, exponents=exponents, ema=ema)
    if left_out:
        state.notes.append(f"the optimizer does not have {_some(left_out)}, which have gradients")
    if names := kept_in_eval_mode(model, modes_of(model)):
        state.notes.append(f"model() has left {_some(names)} in eval mode, where they stay")
    if config.compile:
        state.forward = torch.compile(model)  # type: ignore[assignment]
    return state


class Sample:
    """Some of the rows of the first step, for passes before the training; their number follows from the plan."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        self._spec, self._device = spec, device
        row_ids = spec.plan.row_ids(0, 0)
        self.pass_rows = min(spec.config.micro_batch or len(row_ids), len(row_ids))
        """Rows of one pass."""
        self._row_ids = row_ids[: 2 * self.pass_rows]
        self.num_rows = len(self._row_ids)

    def run_pass(self, model: Any, rows: slice | None = None) -> torch.Tensor:
        """The summed loss of a forward pass over some rows (by default those of one pass), seeded alike each time."""
        spec, row_ids = self._spec, self._row_ids[rows or slice(0, self.pass_rows)]
        batch = on_device(first_batch(spec, "train", row_ids), self._device)
        seed_everything(spec.config.seed, 1, 0)
        modes = user_code("loss in the warm-up pass"), autocast(spec.config.precision, self._device)
        with modes[0], deterministic_kernels_only(), modes[1]:
            return as_sum(spec.task.loss(model, batch), len(row_ids), "loss")[0]


def first_batch(spec: RunSpec, name: str, row_ids: NDArray[np.int64]) -> Batch:
    """Rows of a source as the hooks see them, for passes before the training. Raises as `first_rows`, and TaskError."""
    source = spec.sources[name]
    with user_code(f"transform, or reading, of {name!r} before the first step"):
        return to_tensors(first_rows(source, own_transform(spec.task), row_ids), source.left_out)


def restore_newest(state: TrainState, store: CheckpointStore, best: str) -> StateRestored:
    """Loads the newest verified checkpoint into `state`; step 0 if there is none.

    Raises:
        ResumeError: all checkpoints are damaged.
    """
    checkpoint, damaged = store.to_resume()
    if checkpoint is None:
        state.step = 0
        return StateRestored(step=0, checkpoint="")
    files = {name: store.read(checkpoint, name) for name in checkpoint.manifest.files}
    state.load_checkpoint(files, keeps_settings=CLONED_FROM in checkpoint.manifest.run)
    metrics = dict(checkpoint.manifest.metrics)
    state.evaluation = EvaluationState(state.step if metrics else NO_STATE, _best_score(store, best), metrics=metrics)
    reasons = {skipped.name: skipped.reason for skipped in damaged}
    return StateRestored(step=state.step, checkpoint=checkpoint.name, damaged=reasons)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_type(hook: str, value: object, expected: type) -> None:
    if not isinstance(value, expected):
        wanted = f"{expected.__module__}.{expected.__name__}"
        raise TaskError(f"{hook} returned {type(value).__name__}; it returns a {wanted}", hook)


def _best_score(store: CheckpointStore, best: str) -> float | None:
    checkpoint = best_of(store.list(), best)
    score = checkpoint.manifest.metrics.get(parse_best(best)[1], math.nan) if checkpoint else math.nan
    return float(score) if math.isfinite(score) else None
