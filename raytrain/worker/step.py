"""One optimizer step: the passes of the logical workers assigned to this rank, one reduction, one commit.

The gradient that is applied is that of `sum(loss) / sum(weight)` over the global batch, whatever the number of ranks.
Before the commit nothing persistent has changed, so a step that loses a peer can be repeated; once the commit begins no
collective stands in its way, so weights, optimizer, scheduler and step number change together. Runs in the training thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from raytrain.data.loader import MicroBatch
from raytrain.errors import TaskError
from raytrain.events.row_ids import pack
from raytrain.plan import Plan
from raytrain.rendezvous.health import REDUCING
from raytrain.rendezvous.state import Signals
from raytrain.worker.bitwise import deterministic_kernels_only
from raytrain.worker.buffers import BufferReducer, WriteGuard, find_written, unchanged_buffers
from raytrain.worker.context import RunSpec
from raytrain.worker.failures import peer_loss
from raytrain.worker.group import Group
from raytrain.worker.heartbeat import HeartbeatSender
from raytrain.worker.hooks import as_sum, autocast, check_loss, on_device, seed_everything, shapes_of, user_code
from raytrain.worker.model import check_gradients, check_parameter_groups, first_not_finite
from raytrain.worker.reducers import IN_LOSS, build_reducer
from raytrain.worker.state import Sample, TrainState

IN_BACKWARD, IN_OPTIMIZER = "in a backward pass", "in the optimizer"
"""Activities of the training thread, besides those of `rendezvous.health`."""

MAX_ATTEMPTS = 3
"""Attempts at the passes of one step: exact sums need a second one if gradients have grown much, and never a third."""

StepBatches = Mapping[int, Sequence[MicroBatch]]
"""The micro-batches of each logical worker assigned to this rank; none where a short step leaves it no rows."""


@dataclass(frozen=True)
class StepResult:
    """What every rank knows of a finished step.

    Args:
        loss: sum / weight over the global batch.
        weight: rows, or what the task's losses count.
        applied: False if the loss or the gradient was not finite, so that the weights stayed as they were.
        signals: what any rank signalled.
        learning_rate: the one that the step used.
    """

    loss: float
    weight: float
    applied: bool
    signals: Signals
    learning_rate: float


class TrainStep:
    """Takes the steps of one generation."""

    def __init__(self, spec: RunSpec, state: TrainState, group: Group, heartbeat: HeartbeatSender) -> None:
        self._task, self._config, self._state, self._group, self._heartbeat = spec.task, spec.config, state, group, heartbeat
        self._num_steps = spec.num_steps
        num_terms = spec.config.num_logical if spec.config.exactness == "bitwise" else 1
        self._buffers = BufferReducer(state.model, state.written_buffers, num_terms)
        self._guard = WriteGuard(state.model, state.written_buffers)
        self._group_sizes = [len(group["params"]) for group in state.optimizer.param_groups]
        self._parameters = list(state.model.parameters())
        self._begin_reducer()

    def run(self, batches: StepBatches, planned_rows: int, pending: Signals) -> StepResult:
        """Takes step `state.step` and advances the state.

        Args:
            batches: the micro-batches of the logical workers assigned to this rank.
            planned_rows: rows of this step over all logical workers.
            pending: what this rank wants all others to know.

        Raises:
            PeerLost: a peer is gone (raised by the block of `process_group`); the state is as it was before.
            TaskError: the user's code raised.
        """
        self._state.set_train_mode()
        if self._is_trained != [parameter.requires_grad for parameter in self._parameters]:
            self._reducer.close()  # parameters were frozen or unfrozen since the last step, on all ranks alike
            self._begin_reducer()
        vector, buffers = self._reduce(batches, planned_rows, pending)
        totals, norm = self._read(vector)
        return self._commit(totals, norm, planned_rows, buffers)

    def check_progress(self, batches: StepBatches) -> None:
        """Call it after a step that was skipped.

        Raises:
            TaskError: too many steps in a row were skipped, or all steps of the run.
        """
        step, (applied_at, loss) = self._state.step, self._state.last_applied
        is_over = step == self._num_steps and applied_at < 0
        if step - max(applied_at, 0) < self._config.max_skipped and not is_over:
            return
        columns = {name: column for micros in batches.values() for m in micros for name, column in m.columns.items()}
        found = self._group.all_gather_object(first_not_finite(self._state.model, columns))
        culprit = next((f"{name} on rank {rank}" for rank, name in enumerate(found) if name), "the loss alone")
        last = f"the last finite loss was {loss:.6g}, in step {applied_at - 1}" if applied_at > 0 else "no loss was finite"
        first = max(applied_at, 0)
        raise TaskError(
            f"{step - first} steps in a row were skipped since step {first}, since loss or gradient was not finite; {last}. "
            f"Not finite in step {step - 1}: {culprit}. Lower the learning rate, clean the data, or raise run.max_skipped",
            "loss",
        )

    def close(self) -> None:
        """Releases what would keep the process group from being destroyed."""
        self._reducer.close()

    def _begin_reducer(self) -> None:
        self._is_trained = [parameter.requires_grad for parameter in self._parameters]
        self._reducer = build_reducer(self._config, self._state, self._group, self._heartbeat)

    def _reduce(self, batches: StepBatches, planned_rows: int, pending: Signals) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Runs and reduces the passes, again if the reducer asks for it; returns the reduced vector, and buffers."""
        self._guard.begin()
        for _ in range(MAX_ATTEMPTS):
            self._state.clear_gradients()
            self._reducer.begin()
            self._buffers.begin()
            try:
                vector = self._run_passes(batches, planned_rows, pending)
                is_reduced = self._reducer.reduce()
                buffers = self._buffers.reduce(self._group)
            finally:
                self._buffers.rewind()
            if is_reduced:
                return vector, buffers
        step = self._state.step
        raise TaskError(f"loss at step {step} gives other gradients each time for the same rows and random numbers", "loss")

    def _run_passes(self, batches: StepBatches, planned_rows: int, pending: Signals) -> torch.Tensor:
        """Forward and backward of each micro-batch; returns [loss sums, weights, regroup, save, stop] over all ranks.

        Loss and weight of each logical worker have elements of their own in the vector that is reduced, and are added in the
        order of logical workers: the same values for any number of ranks.
        """
        device, reducer, num_logical = self._group.device, self._reducer, self._config.num_logical
        vector = torch.zeros(2 * num_logical + 3, dtype=torch.float64, device=device)
        vector[-3:] = torch.tensor([float(pending.regroup), float(pending.save), float(pending.stop)])
        losses, weights = vector[:num_logical], vector[num_logical:-3]
        scale, work = reducer.loss_scale(planned_rows), None
        for logical, micro, is_first, is_last, is_final in _passes(batches):
            reducer.begin_pass(is_final)
            if is_first:
                seed_everything(self._config.seed, self._state.step + 1, logical)  # (seed, 0, 0) seeds the initial weights
                self._buffers.rewind()
            loss, weight = self._forward(micro)
            losses[logical] += loss.detach().double()
            weights[logical] += weight.detach().double() if isinstance(weight, torch.Tensor) else weight
            if is_final:
                self._check_model_was_called()
                work = self._group.all_reduce_async(vector)
            self._backward(loss * scale, shapes_of(micro.columns))
            if is_last:
                self._buffers.collect(logical)
                reducer.end_logical_worker()
        if work is None:  # this rank has no rows in this short step; its collectives come in the order of the others'
            idle_loss = reducer.idle_loss()
            work = self._group.all_reduce_async(vector)
            if idle_loss is not None:
                self._backward(idle_loss)
        work.wait()
        return vector

    def _read(self, vector: torch.Tensor) -> tuple[list[float], torch.Tensor]:
        """[loss sum, weight, regroup, save, stop, norm], and the norm of the gradients, finite only if they are.

        Here, once per step, the host waits for the device. Errors of NCCL come late, too: the update must not be queued
        behind one.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = _sum(gradients) if self._config.clip_norm is None else torch.nn.utils.get_total_norm(gradients)
        to_read = torch.cat([vector, norm.detach().to(vector).reshape(1)])
        self._group.synchronize()
        values, num_logical = to_read.tolist(), self._config.num_logical
        return [sum(values[:num_logical]), sum(values[num_logical:-4]), *values[-4:]], norm

    def _forward(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor | float]:
        device = self._group.device
        batch = on_device(micro.columns, device)
        where = f"loss at step {self._state.step} on rank {self._group.rank}"
        self._heartbeat.set_activity(IN_LOSS, shapes_of(batch))
        with user_code(where), autocast(self._config.precision, device):
            result = as_sum(self._task.loss(self._reducer.model, batch), len(micro.row_ids), "loss")
        self._check_written()
        return result

    def _check_written(self) -> None:
        """Raises TaskError if a pass has changed what only the commit may change, since other ranks see other rows."""
        if names := self._guard.find_frozen_or_unfrozen():
            fix = "do it between steps, in a hook of the optimizer (register_step_post_hook) or in the scheduler's step"
            raise TaskError(f"loss has frozen or unfrozen parameters: {', '.join(names[:3])}; {fix}", "loss")
        if names := self._guard.find_written():
            fix = "it may write what its first pass in the warm-up writes; change the rest in a hook of the optimizer"
            raise TaskError(f"loss has written {', '.join(names[:3])}, which no pass wrote before; {fix}", "loss")

    def _backward(self, loss: torch.Tensor, shapes: int = 0) -> None:
        self._heartbeat.set_activity(REDUCING if self._reducer.waits_in_backward else IN_BACKWARD, shapes)
        with user_code(f"the backward pass at step {self._state.step} on rank {self._group.rank}"), peer_loss():
            loss.backward()  # type: ignore[no-untyped-call]

    def _check_model_was_called(self) -> None:
        """Raises TaskError if the gradients of the last pass would not be reduced, so that the ranks would diverge."""
        if not self._reducer.model.num_calls:
            raise TaskError("loss did not call the model; it calls model(...), not only the model's methods", "loss")

    def _commit(self, totals: list[float], norm: torch.Tensor, planned_rows: int, buffers: list[torch.Tensor]) -> StepResult:
        """Applies the step. Nothing can fail from here on but the user's own optimizer or scheduler."""
        loss_sum, weight, regroup, save, stop, size = totals
        state, config = self._state, self._config
        trained = [parameter for parameter in self._parameters if parameter.grad is not None]
        scale = planned_rows / weight if weight else 1.0
        if scale != 1.0:
            torch._foreach_mul_([parameter.grad for parameter in trained if parameter.grad is not None], scale)
        applied = math.isfinite(loss_sum) and math.isfinite(weight) and math.isfinite(size * scale)
        if applied and config.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(trained, config.clip_norm, norm * scale)
        learning_rate = state.learning_rate
        self._heartbeat.set_activity(IN_OPTIMIZER)
        if applied:
            self._buffers.assign(buffers)
            seed_everything(config.seed, state.step + 1, config.num_logical)  # after those of the logical workers
            with user_code(f"optimizer at step {state.step} on rank {self._group.rank}"):
                state.optimizer.step()
            check_parameter_groups(state.optimizer, self._group_sizes)
            if state.ema is not None:
                state.ema.update()
            state.last_applied = (state.step + 1, loss_sum / weight if weight else 0.0)
        if state.schedule is not None:
            with user_code(f"scheduler at step {state.step} on rank {self._group.rank}"):
                state.schedule.finish_step(state.step + 1, applied)
        self._reducer.end_step(applied)
        state.step += 1
        self._heartbeat.finish_step(state.step)
        signals = Signals(regroup=regroup > 0, save=save > 0, stop=stop > 0)
        return StepResult(loss_sum / weight if weight else 0.0, weight, applied, signals, learning_rate)


def warm_up(spec: RunSpec, state: TrainState, device: torch.device) -> None:
    """Runs one forward and backward pass that leaves no trace, and looks at what it did: the same on all workers.

    Raises:
        ConfigError: the model or the gradients are of a kind that cannot be kept equal for any number of workers.
        TaskError: the loss raised.
    """
    config, sample = spec.config, Sample(spec, device)
    state.set_train_mode()
    with unchanged_buffers(state.model):
        loss = sample.run_pass(state.forward)
        check_loss(spec.task, state.model, loss)
        with user_code("the backward pass in the warm-up"), deterministic_kernels_only():
            loss.backward()  # type: ignore[no-untyped-call]
    check_gradients(state.model, config.clip_norm is not None, config.exactness == "bitwise")
    state.clear_gradients()
    num_rows, in_pass = sample.num_rows, sample.pass_rows
    other = slice(num_rows - in_pass + (in_pass > 2), num_rows)  # other rows, and another number of them where it can be
    first = slice(0, in_pass)
    state.written_buffers = find_written(state.model, lambda rows: sample.run_pass(state.model, rows), first, other)


def gather_row_ids(group: Group, plan: Plan, step: int, batches: StepBatches) -> str:
    """The row numbers that came with the data of all ranks, packed; gathered before the commit, so that every rank has them.

    Each logical worker has its own slice of a vector of the step's rows, so that equal positions on two ranks add up to a
    wrong number instead of hiding each other.
    """
    row_ids = torch.zeros(plan.rows_in_step(step), dtype=torch.int64)
    for logical, micros in batches.items():
        start = sum(plan.batch_size(step, other) for other in range(logical))
        for micro in micros:
            row_ids[start : start + len(micro.row_ids)] += torch.from_numpy(micro.row_ids.copy())
            start += len(micro.row_ids)
    return pack(group.all_reduce(row_ids.to(group.device)).cpu().numpy())


def _passes(batches: StepBatches) -> Iterator[tuple[int, MicroBatch, bool, bool, bool]]:
    """(logical, micro-batch, is it the logical worker's first, its last, the last of all)."""
    passes = [(logical, micros) for logical, micros in sorted(batches.items()) if micros]
    for number, (logical, micros) in enumerate(passes):
        for i, micro in enumerate(micros):
            is_last = i == len(micros) - 1
            yield logical, micro, i == 0, is_last, is_last and number == len(passes) - 1


def _sum(gradients: list[torch.Tensor]) -> torch.Tensor:
    """A number that is finite only if all gradients are; on a CPU a sum takes half the time of a norm."""
    if gradients and gradients[0].is_cuda:  # where one kernel per parameter would cost more than the fused norm
        return torch.nn.utils.get_total_norm(gradients)
    real = [torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in gradients]
    return torch.stack([gradient.sum() for gradient in real]).sum() if real else torch.zeros(())
