"""One optimizer step: the passes of the logical workers held here, one reduction, one commit.

The gradient that is applied is that of `sum(loss) / sum(weight)` over the global batch, whatever the number of ranks.
Until the commit nothing that must survive has changed, so a step that loses a peer can be redone; after the commit begins
no collective stands in the way, so weights, optimizer, scheduler and step number move together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from raytrain.config import RunConfig
from raytrain.data.batch import MicroBatch
from raytrain.errors import TaskError
from raytrain.rendezvous.state import Signals
from raytrain.rendezvous.vitals import WAITING
from raytrain.task import Task
from raytrain.worker.buffers import StepBuffers
from raytrain.worker.group import Group, peer_loss
from raytrain.worker.hooks import as_sum, autocast, on_device, seed_everything, user_code
from raytrain.worker.pulse import Pulse
from raytrain.worker.reducers import reducer_for
from raytrain.worker.replica import IN_LOSS
from raytrain.worker.state import TrainState

IN_BACKWARD, IN_OPTIMIZER = "in a backward pass", "in the optimizer"
"""Places of the training thread, besides those of `rendezvous.vitals`."""

MOST_TRIES = 3
"""Passes of one step: exact sums need a second try where gradients have grown much, and never a third one."""

Shares = Mapping[int, Sequence[MicroBatch]]
"""The micro-batches of each logical worker held here; none where a short step leaves it no rows."""


@dataclass(frozen=True)
class StepResult:
    """What is known of a finished step on every rank.

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


class Stepper:
    """Takes the steps of one generation."""

    def __init__(self, task: Task, config: RunConfig, state: TrainState, group: Group, pulse: Pulse) -> None:
        self._task, self._config, self._state, self._group, self._pulse = task, config, state, group, pulse
        self._reducer = reducer_for(config, state, group, pulse)
        self._buffers = StepBuffers(state.model, config.num_logical if config.exactness == "bitwise" else 1)
        self._trained = [p for p in state.model.parameters() if p.requires_grad]

    def run(self, shares: Shares, planned_rows: int, signals: Signals) -> StepResult:
        """Takes step `state.step` and moves the state past it.

        Args:
            shares: the micro-batches of the logical workers held here.
            planned_rows: rows of this step over all logical workers.
            signals: what this rank wants all others to know.

        Raises:
            PeerLost: a peer is gone (turned into this by the block of `group.form`); the state is as it was before.
            TaskError: the user's code raised.
        """
        state = self._state
        state.model.train()
        state.optimizer.zero_grad()
        totals, buffers = self._reduced(shares, planned_rows, signals)
        if self._group.device.type == "cuda":  # errors of NCCL come late: the update must not be queued behind one
            torch.cuda.current_stream(self._group.device).synchronize()
        return self._commit(totals, planned_rows, buffers)

    def _reduced(self, shares: Shares, planned_rows: int, signals: Signals) -> tuple[list[float], list[torch.Tensor]]:
        """The passes and their reduction, once more where the reducer asks for it; returns totals and buffers."""
        for _ in range(MOST_TRIES):
            self._reducer.begin()
            self._buffers.begin()
            try:
                totals = self._passes(shares, planned_rows, signals)
                is_reduced = self._reducer.reduce()
                buffers = self._buffers.reduced(self._group)
            finally:
                self._buffers.rewind()
            if is_reduced:
                return totals, buffers
        step = self._state.step
        raise TaskError(f"loss at step {step} gives other gradients each time for the same rows and random numbers", "loss")

    def close(self) -> None:
        """Lets go of what would stand in the way of the end of the process group."""
        self._reducer.close()

    def _passes(self, shares: Shares, planned_rows: int, signals: Signals) -> list[float]:
        """Forward and backward of every micro-batch; returns [loss sum, weight, gather, save, stop] over all ranks.

        The loss and the weight of each logical worker have places of their own in the vector that is reduced, and are added
        up in the order of logical workers: the same values for any number of ranks.
        """
        device, reducer, num_logical = self._group.device, self._reducer, self._config.num_logical
        vector = torch.zeros(2 * num_logical + 3, dtype=torch.float64, device=device)
        vector[-3:] = torch.tensor([float(signals.gather), float(signals.save), float(signals.stop)])
        losses, weights = vector[:num_logical], vector[num_logical:-3]
        factor, work = reducer.factor(planned_rows), None
        for logical, micro, is_first, is_last, is_final in _passes_of(shares):
            reducer.open_pass(is_final)
            if is_first:
                seed_everything(self._config.seed, self._state.step + 1, logical)  # (seed, 0, 0) are the initial weights'
                self._buffers.rewind()
            loss, weight = self._forward(micro)
            losses[logical] += loss.detach().double()
            weights[logical] += weight.detach().double() if isinstance(weight, torch.Tensor) else weight
            if is_final:
                self._check_called()
                work = self._group.start_sum(vector)
            self._backward(loss * factor)
            if is_last:
                self._buffers.collect(logical)
                reducer.close_share()
        if work is None:  # no rows here in this short step
            work = self._group.start_sum(vector)
            if (idle := reducer.pass_without_rows()) is not None:
                self._backward(idle)
        work.wait()
        values = vector.tolist()
        return [sum(values[:num_logical]), sum(values[num_logical:-3]), *values[-3:]]

    def _forward(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor | float]:
        device = self._group.device
        batch = on_device(micro.columns, device)
        where = f"loss at step {self._state.step} on rank {self._group.rank}"
        self._pulse.mark(IN_LOSS)
        with user_code(where), autocast(self._config.precision, device):
            return as_sum(self._task.loss(self._reducer.model, batch), len(micro.rows), "loss")

    def _backward(self, loss: torch.Tensor) -> None:
        self._pulse.mark(WAITING if self._reducer.reduces_now else IN_BACKWARD)
        with user_code(f"the backward pass at step {self._state.step} on rank {self._group.rank}"), peer_loss():
            loss.backward()  # type: ignore[no-untyped-call]

    def _check_called(self) -> None:
        """Raises TaskError if the gradients of the last pass would not be reduced, so that the ranks would part."""
        if not self._reducer.model.num_calls:
            raise TaskError("loss did not call the model; it calls model(...), not only the model's methods", "loss")

    def _commit(self, totals: list[float], planned_rows: int, buffers: list[torch.Tensor]) -> StepResult:
        """From here on nothing can fail but the user's own optimizer or scheduler."""
        loss_sum, weight, gather, save, stop = totals
        state, config = self._state, self._config
        gradients = [p.grad for p in self._trained if p.grad is not None]
        if weight != planned_rows and weight:
            torch._foreach_mul_(gradients, planned_rows / weight)
        size = _sum_of(gradients) if config.clip_norm is None else torch.nn.utils.get_total_norm(gradients)
        applied = math.isfinite(loss_sum) and math.isfinite(weight) and bool(size.isfinite())
        if applied and config.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._trained, config.clip_norm, size)
        learning_rate = state.learning_rate
        self._pulse.mark(IN_OPTIMIZER)
        if applied:
            with user_code(f"optimizer at step {state.step} on rank {self._group.rank}"):
                state.optimizer.step()
                if state.scheduler is not None:
                    state.scheduler.step()
            self._buffers.assign(buffers)
            self._reducer.commit()
        state.step += 1
        self._pulse.finish_step(state.step)
        signals = Signals(gather=gather > 0, save=save > 0, stop=stop > 0)
        return StepResult(loss_sum / weight if weight else 0.0, weight, applied, signals, learning_rate)


def _passes_of(shares: Shares) -> Iterator[tuple[int, MicroBatch, bool, bool, bool]]:
    """(logical, micro-batch, is it the logical worker's first, its last, the last of all)."""
    passes = [(logical, micros) for logical, micros in sorted(shares.items()) if micros]
    for number, (logical, micros) in enumerate(passes):
        for i, micro in enumerate(micros):
            is_last = i == len(micros) - 1
            yield logical, micro, i == 0, is_last, is_last and number == len(passes) - 1


def _sum_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    """A number that is finite only if all gradients are; on a CPU a sum is known in half the time of a norm."""
    if gradients and gradients[0].is_cuda:  # where one kernel per parameter would cost more than the fused norm
        return torch.nn.utils.get_total_norm(gradients)
    return torch.stack([gradient.sum() for gradient in gradients]).sum() if gradients else torch.zeros(())
