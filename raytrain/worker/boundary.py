"""What is due between two steps: evaluation, digests, checkpoints, and the last checkpoint's way to storage.

All ranks decide alike, since they decide from the step number and from what they share; only the leader tells digests
and saves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from raytrain.checkpoint.saver import Saver
from raytrain.errors import CheckpointError, StorageError
from raytrain.events.kinds import EvaluationDone
from raytrain.rendezvous.state import NO_STATE, Signals
from raytrain.rendezvous.vitals import SAVING, WAITING
from raytrain.worker.digest import state_digest
from raytrain.worker.evaluation import BrokenOff, evaluate
from raytrain.worker.group import Group
from raytrain.worker.state import Boundary, TrainState
from raytrain.worker.surroundings import Surroundings

QUIET = Signals()
PATIENCE_S = 30.0
"""For a storage that does not take the last checkpoint of a run, or of a group whose nodes go away."""


def is_due(step: int, every: int, num_steps: int) -> bool:
    """Whether something that happens every so many finished steps, and at the end, happens at `step` finished steps."""
    return step > 0 and (step % every == 0 or step == num_steps)


def is_better(score: float | None, than: float | None, best: str) -> bool:
    """Whether a score is a new best; `best` is min:metric or max:metric."""
    if score is None or not math.isfinite(score):
        return False
    return than is None or (score < than if best.startswith("min:") else score > than)


class BoundaryDuties:
    """The duties of one generation."""

    def __init__(
        self,
        around: Surroundings,
        group: Group,
        held: range,
        saver: Saver,
        heard: Callable[[], Signals] = Signals,
    ) -> None:
        self._around, self._group, self._held, self._saver, self._heard = around, group, held, saver, heard
        self._digested = NO_STATE

    def at_boundary(self, state: TrainState, told: Signals = QUIET) -> Signals:
        """Evaluates, digests and saves what is due and not done yet; a stop, or all leaving, makes a checkpoint due.

        Args:
            told: what all ranks have agreed on with the step.

        Returns:
            what they agree on now: an evaluation that was broken off says more.
        """
        config, per_epoch, num_steps = self._around.config, self._around.plan.steps_per_epoch, self._around.num_steps
        names = [name for name in self._around.sources if name != "train"]
        if (
            names
            and is_due(state.step, config.eval_every or per_epoch, num_steps)
            and state.boundary.evaluated != state.step
        ):
            told = self._evaluate_unless_called(state, names, told)
        if config.digest_every and is_due(state.step, config.digest_every, num_steps):
            self._digest(state)
        is_best = state.boundary.best_step == state.step  # also if an earlier leader found it and did not live to save it
        is_last = told.stop or told.save
        if is_last or is_best or is_due(state.step, config.checkpoint_every or per_epoch, num_steps):
            self._save(state)
        return told

    def finish(self, state: TrainState, patience_s: float = PATIENCE_S) -> None:
        """Keeps the ranks together until the checkpoint is on storage, so that a peer can save it if the leader dies.

        Args:
            patience_s: for so long a checkpoint that could not be saved is saved again, since storage may come back.

        Raises:
            CheckpointError: the last checkpoint could not be saved.
        """
        until = time.monotonic() + patience_s
        self._around.pulse.mark(WAITING)
        while True:
            busy = self._group.leads and self._is_unsaved(state, until)
            if not self._group.sum(torch.tensor([float(busy)], device=self._group.device)).item():
                break
            time.sleep(0.02)
        if self._group.leads and self._saver.last_error is not None:
            raise CheckpointError(f"the last checkpoint, of step {state.step}, was not saved: {self._saver.last_error}")

    def _is_unsaved(self, state: TrainState, until: float) -> bool:
        """Whether the checkpoint is on its way, once more after a failure; `until` in monotonic seconds."""
        if self._saver.idle and self._saver.last_error is not None and time.monotonic() < until:
            self._hand_over(state)
            return True
        return not self._saver.idle

    def _evaluate_unless_called(self, state: TrainState, names: list[str], told: Signals) -> Signals:
        try:
            self._evaluate(state, names)
        except BrokenOff as call:
            more = call.signals
            return Signals(told.gather or more.gather, told.save or more.save, told.stop or more.stop)
        return told

    def _heard_now(self, state: TrainState) -> Signals:
        """A stop does not break off the last evaluation: with the last step saved, the run would count as complete."""
        heard = self._heard()
        return replace(heard, stop=False) if state.step == self._around.num_steps else heard

    def _evaluate(self, state: TrainState, names: list[str]) -> None:
        started, config = time.monotonic(), self._around.config
        metrics: dict[str, float] = {}
        for name in names:
            heard = partial(self._heard_now, state)
            metrics.update(evaluate(self._around, state.model, self._group, name, self._held, heard))
        before = state.boundary
        score = metrics.get(config.best.partition(":")[2])
        is_best = is_better(score, before.best_score, config.best)
        best = (score, state.step) if is_best else (before.best_score, before.best_step)
        state.boundary = Boundary(state.step, *best, metrics)
        if self._group.leads:
            rows = sum(self._around.sources[name].num_rows for name in names)
            seconds = time.monotonic() - started
            self._around.telemetry.emit(
                EvaluationDone(step=state.step, metrics=metrics, rows=rows, seconds=seconds, is_best=is_best)
            )

    def _save(self, state: TrainState) -> None:
        """Hands the state to the saver, unless it, or the leader before this one, has saved this step already."""
        saver = self._saver
        if not self._group.leads or saver.newest_step == state.step:
            return
        if saver.newest_step is None and self._is_saved(state):
            return
        self._around.pulse.mark(SAVING)
        if self._around.config.digest_every == 0:
            self._digest(state)  # first, so that a checkpoint's digest is in the log by the time that the checkpoint exists
        self._hand_over(state)

    def _hand_over(self, state: TrainState) -> None:
        metrics = state.boundary.metrics if state.boundary.evaluated == state.step else {}
        self._saver.save(state.snapshot(), metrics, self._around.run_facts)

    def _is_saved(self, state: TrainState) -> bool:
        """Whether there is a checkpoint of this step, with metrics if they are known by now.

        No if the store cannot be read, since saving twice does no harm.
        """
        has_metrics = state.boundary.evaluated == state.step
        try:
            of_this_step = [found for found in self._around.store.list() if found.step == state.step]
        except StorageError:
            return False
        return any(found.manifest.metrics or not has_metrics for found in of_this_step)

    def _digest(self, state: TrainState) -> None:
        """Tells the digest of the state; a new generation tells it again, after the state was handed over."""
        if not self._group.leads or self._digested == state.step:
            return
        self._around.pulse.mark(SAVING)
        self._digested = state.step
        self._around.telemetry.emit(state_digest(state))
