"""What is due between two steps: evaluation, digests, checkpoints, and waiting until the last checkpoint is on storage.

All ranks decide alike, from the step number and from what they share; only the leader emits digests and saves. Runs in the
worker's training thread.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial

import torch

from raytrain.checkpoint.saver import Saver
from raytrain.errors import CheckpointError, FourPartError, StorageError, TaskError
from raytrain.events.kinds import EvaluationDone
from raytrain.rendezvous.health import SAVING, WAITING
from raytrain.rendezvous.state import NO_STATE, Signals
from raytrain.worker.bitwise import state_digest
from raytrain.worker.buffers import unchanged_buffers
from raytrain.worker.context import WorkerContext
from raytrain.worker.evaluation import EvaluationInterrupted, evaluate
from raytrain.worker.group import Group
from raytrain.worker.heartbeat import SignalWatcher
from raytrain.worker.hooks import user_code
from raytrain.worker.sanity_check import check_savable_state
from raytrain.worker.state import EvaluationState, TrainState

NO_SIGNALS = Signals()
LAST_SAVE_RETRY_S = 30.0
"""How long to retry the last checkpoint of a run, or of a group whose nodes all drain."""
SAVE_POLL_S = 0.02


def is_due(step: int, every: int, num_steps: int) -> bool:
    """Whether something that happens every `every` finished steps, and at the end, happens at `step` finished steps."""
    return step > 0 and (step % every == 0 or step == num_steps)


def is_better(score: float | None, than: float | None, best: str) -> bool:
    """Whether a score is a new best; `best` is min:metric or max:metric."""
    if score is None or not math.isfinite(score):
        return False
    return than is None or (score < than if best.startswith("min:") else score > than)


class StepBoundary:
    """Does what is due at the step boundaries of one generation."""

    def __init__(self, context: WorkerContext, group: Group, assigned: range, saver: Saver, watcher: SignalWatcher) -> None:
        self._context, self._group, self._assigned, self._saver, self._watcher = context, group, assigned, saver, watcher
        self._digested_step = NO_STATE
        self._is_checked = False

    def run_due(self, state: TrainState, agreed: Signals = NO_SIGNALS) -> Signals:
        """Evaluates, digests and saves what is due and not done yet; a stop, or a drain of all members, makes a save due.

        Args:
            agreed: the signals that all ranks agreed on with the step.

        Returns:
            the signals that they agree on now: an interrupted evaluation adds to them.
        """
        spec, config = self._context.spec, self._context.spec.config
        per_epoch = spec.plan.steps_per_epoch
        if state.step and not self._is_checked:  # from its first step on, the optimizer has a state
            check_savable_state(spec, state)
            self._is_checked = True
        if config.digest_every and is_due(state.step, config.digest_every, spec.num_steps):
            self._emit_digest(state)
        is_save_due = is_due(state.step, config.checkpoint_every or per_epoch, spec.num_steps)
        if is_save_due or agreed.stop or agreed.save:
            self._save(state)  # before an evaluation, in which the task may fail, or the process die
        is_evaluated = state.evaluation.step == state.step or not spec.eval_names
        if not is_evaluated and is_due(state.step, config.eval_every or per_epoch, spec.num_steps):
            agreed = self._try_evaluate(state, agreed)
        is_best = state.evaluation.best_step == state.step  # also if an earlier leader found it and died before it saved it
        if is_save_due or is_best or agreed.stop or agreed.save:
            self._save(state)
        if state.schedule is not None and state.evaluation.step == state.step:
            with user_code(f"scheduler after the evaluation at step {state.step}"):
                state.schedule.finish_evaluation(state.step, state.evaluation.metrics)
        return agreed

    def wait_until_saved(self, state: TrainState, retry_s: float = LAST_SAVE_RETRY_S) -> None:
        """Keeps the ranks together until the checkpoint is on storage, so that a peer can save it if the leader dies.

        Args:
            retry_s: for how long a checkpoint that could not be saved is saved again.

        Raises:
            CheckpointError: the last checkpoint could not be saved.
        """
        self._wait_for_saver(state, retry_s)
        if self._group.is_leader and self._saver.last_error is not None:
            raise CheckpointError(f"the last checkpoint, of step {state.step}, was not saved: {self._saver.last_error}")

    def _wait_for_saver(self, state: TrainState, retry_s: float) -> None:
        deadline = time.monotonic() + retry_s
        while True:
            self._context.heartbeat.set_activity(WAITING)
            is_saving = self._group.is_leader and self._is_saving(state, deadline)
            if not self._group.all_reduce(torch.tensor([float(is_saving)], device=self._group.device)).item():
                break
            time.sleep(SAVE_POLL_S)

    def _is_saving(self, state: TrainState, deadline: float) -> bool:
        """Whether the checkpoint is being written; starts it again after a failure, until `deadline` (monotonic seconds)."""
        if self._saver.idle and self._saver.can_retry and time.monotonic() < deadline:
            self._start_save(state)
            return True
        return not self._saver.idle

    def _try_evaluate(self, state: TrainState, agreed: Signals) -> Signals:
        try:
            self._evaluate(state)
        except EvaluationInterrupted as interrupt:
            more = interrupt.signals
            return Signals(agreed.regroup or more.regroup, agreed.save or more.save, agreed.stop or more.stop)
        except (TaskError, FourPartError):  # raised on all ranks; the checkpoint that was due is not lost
            self._wait_for_saver(state, retry_s=0.0)
            raise
        return agreed

    def _pending(self, state: TrainState) -> Signals:
        """A stop does not interrupt the last evaluation: once the last step is saved, the run counts as complete."""
        pending = self._watcher.signals
        return replace(pending, stop=False) if state.step == self._context.spec.num_steps else pending

    def _evaluate(self, state: TrainState) -> None:
        started, spec = time.monotonic(), self._context.spec
        metrics: dict[str, float] = {}
        for name in spec.eval_names:
            metrics.update(self._metrics_of(name, state))
            if state.ema is not None:
                with state.ema.applied():
                    averaged = self._metrics_of(name, state)
                metrics.update({key.replace(f"{name}/", f"{name}/ema/", 1): value for key, value in averaged.items()})
        previous = state.evaluation
        score = metrics.get(spec.config.best_metric)
        is_best = is_better(score, previous.best_score, spec.config.best)
        best = (score, state.step) if is_best else (previous.best_score, previous.best_step)
        state.evaluation = EvaluationState(state.step, *best, metrics)
        if self._group.is_leader:
            rows = sum(spec.sources[name].num_rows for name in spec.eval_names)
            seconds = time.monotonic() - started
            self._context.telemetry.emit(
                EvaluationDone(step=state.step, metrics=metrics, rows=rows, seconds=seconds, is_best=is_best)
            )

    def _metrics_of(self, name: str, state: TrainState) -> dict[str, float]:
        """The metrics of one source; buffers that a pass in eval mode writes are reset."""
        with unchanged_buffers(state.model):
            pending = partial(self._pending, state)
            return evaluate(self._context, state.forward, self._group, name, self._assigned, pending)

    def _save(self, state: TrainState) -> None:
        """Starts to save the state on the leader, unless it, or the leader before this one, has saved this step already.

        A step that was saved before its evaluation gets the metrics of it.
        """
        saver = self._saver
        if not self._group.is_leader:
            return
        if saver.newest_step == state.step or (saver.newest_step is None and self._is_on_storage(state)):
            if state.evaluation.step == state.step:
                saver.set_metrics(state.step, state.evaluation.metrics)
            return
        self._context.heartbeat.set_activity(SAVING)
        if self._context.spec.config.digest_every == 0:
            self._emit_digest(state)  # first, so that the digest of a checkpoint is in the log before the checkpoint exists
        self._start_save(state)

    def _start_save(self, state: TrainState) -> None:
        metrics = state.evaluation.metrics if state.evaluation.step == state.step else {}
        self._saver.save(state.snapshot(), metrics, self._context.spec.manifest_facts)

    def _is_on_storage(self, state: TrainState) -> bool:
        """Whether this step is saved already; False if the storage cannot be read, since saving twice does no harm."""
        try:
            return any(found.step == state.step for found in self._context.store.list())
        except StorageError:
            return False

    def _emit_digest(self, state: TrainState) -> None:
        """Emits the digest of the state once per generation, so also after the state was broadcast."""
        if not self._group.is_leader or self._digested_step == state.step:
            return
        self._context.heartbeat.set_activity(SAVING)
        self._digested_step = state.step
        self._context.telemetry.emit(state_digest(state.step, state.model, state.optimizer))
