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

from raytrain.data.loader import MicroBatch, to_tensors
from raytrain.errors import TaskError
from raytrain.events.row_ids import pack
from raytrain.plan import Plan
from raytrain.rendezvous.health import WAITING
from raytrain.rendezvous.state import Signals
from raytrain.worker.bitwise import deterministic_kernels_only
from raytrain.worker.context import RunSpec, WorkerContext
from raytrain.worker.group import Group, peer_loss
from raytrain.worker.heartbeat import HeartbeatSender
from raytrain.worker.hooks import as_sum, autocast, on_device, own_transform, seed_everything, user_code
from raytrain.worker.reducers import IN_LOSS, BufferReducer, build_reducer
from raytrain.worker.state import TrainState

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
        self._reducer = build_reducer(spec.config, state, group, heartbeat)
        self._buffers = BufferReducer(state.model, spec.config.num_logical if spec.config.exactness == "bitwise" else 1)
        self._trained = [p for p in state.model.parameters() if p.requires_grad]

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
        self._state.model.train()
        self._state.optimizer.zero_grad()
        totals, buffers = self._reduce(batches, planned_rows, pending)
        if self._group.device.type == "cuda":  # errors of NCCL come late: the update must not be queued behind one
            torch.cuda.current_stream(self._group.device).synchronize()
        return self._commit(totals, planned_rows, buffers)

    def close(self) -> None:
        """Releases what would keep the process group from being destroyed."""
        self._reducer.close()

    def _reduce(self, batches: StepBatches, planned_rows: int, pending: Signals) -> tuple[list[float], list[torch.Tensor]]:
        """Runs and reduces the passes, again if the reducer asks for it; returns totals and buffers."""
        for _ in range(MAX_ATTEMPTS):
            self._reducer.begin()
            self._buffers.begin()
            try:
                totals = self._run_passes(batches, planned_rows, pending)
                is_reduced = self._reducer.reduce()
                buffers = self._buffers.reduce(self._group)
            finally:
                self._buffers.rewind()
            if is_reduced:
                return totals, buffers
        step = self._state.step
        raise TaskError(f"loss at step {step} gives other gradients each time for the same rows and random numbers", "loss")

    def _run_passes(self, batches: StepBatches, planned_rows: int, pending: Signals) -> list[float]:
        """Forward and backward of each micro-batch; returns [loss sum, weight, regroup, save, stop] over all ranks.

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
            self._backward(loss * scale)
            if is_last:
                self._buffers.collect(logical)
                reducer.end_logical_worker()
        if work is None:  # this rank has no rows in this short step
            work = self._group.all_reduce_async(vector)
            if (idle_loss := reducer.idle_loss()) is not None:
                self._backward(idle_loss)
        work.wait()
        values = vector.tolist()
        return [sum(values[:num_logical]), sum(values[num_logical:-3]), *values[-3:]]

    def _forward(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor | float]:
        device = self._group.device
        batch = on_device(micro.columns, device)
        where = f"loss at step {self._state.step} on rank {self._group.rank}"
        self._heartbeat.set_activity(IN_LOSS)
        with user_code(where), autocast(self._config.precision, device):
            return as_sum(self._task.loss(self._reducer.model, batch), len(micro.row_ids), "loss")

    def _backward(self, loss: torch.Tensor) -> None:
        self._heartbeat.set_activity(WAITING if self._reducer.waits_in_backward else IN_BACKWARD)
        with user_code(f"the backward pass at step {self._state.step} on rank {self._group.rank}"), peer_loss():
            loss.backward()  # type: ignore[no-untyped-call]

    def _check_model_was_called(self) -> None:
        """Raises TaskError if the gradients of the last pass would not be reduced, so that the ranks would diverge."""
        if not self._reducer.model.num_calls:
            raise TaskError("loss did not call the model; it calls model(...), not only the model's methods", "loss")

    def _commit(self, totals: list[float], planned_rows: int, buffers: list[torch.Tensor]) -> StepResult:
        """Applies the step. Nothing can fail from here on but the user's own optimizer or scheduler."""
        loss_sum, weight, regroup, save, stop = totals
        state, config = self._state, self._config
        gradients = [p.grad for p in self._trained if p.grad is not None]
        if weight != planned_rows and weight:
            torch._foreach_mul_(gradients, planned_rows / weight)
        norm = _sum(gradients) if config.clip_norm is None else torch.nn.utils.get_total_norm(gradients)
        applied = math.isfinite(loss_sum) and math.isfinite(weight) and bool(norm.isfinite())
        if applied and config.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._trained, config.clip_norm, norm)
        learning_rate = state.learning_rate
        self._heartbeat.set_activity(IN_OPTIMIZER)
        if applied:
            with user_code(f"optimizer at step {state.step} on rank {self._group.rank}"):
                state.optimizer.step()
                if state.scheduler is not None:
                    state.scheduler.step()
            self._buffers.assign(buffers)
            self._reducer.commit()
        state.step += 1
        self._heartbeat.finish_step(state.step)
        signals = Signals(regroup=regroup > 0, save=save > 0, stop=stop > 0)
        return StepResult(loss_sum / weight if weight else 0.0, weight, applied, signals, learning_rate)


def warm_up(context: WorkerContext, state: TrainState) -> None:
    """Runs one forward and backward pass that leaves no trace, so that whatever a first pass sets up is set up."""
    spec, device = context.spec, context.device
    rows = spec.plan.row_ids(0, 0)[: spec.config.micro_batch]
    columns = spec.sources["train"].take(rows)
    if (transform := own_transform(spec.task)) is not None:
        with user_code("transform"):
            columns = transform(columns)
    buffers = BufferReducer(state.model)
    buffers.begin()
    state.model.train()
    batch = on_device(to_tensors(columns), device)
    with user_code("loss in the warm-up pass"), deterministic_kernels_only():
        with autocast(spec.config.precision, device):
            loss, _ = as_sum(spec.task.loss(state.model, batch), len(rows), "loss")
        loss.backward()  # type: ignore[no-untyped-call]
    state.optimizer.zero_grad()
    buffers.rewind()


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
    return torch.stack([gradient.sum() for gradient in gradients]).sum() if gradients else torch.zeros(())
