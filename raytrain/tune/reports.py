"""What does a trial tell Ray Tune? One report per evaluation, with the global metrics and where the run stands.

A report waits for the checkpoint of its step where there will be one, so that what a scheduler does next (pause, clone)
stands on a checkpoint that is there. Values only; runs in the process of the trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from raytrain.events import kinds


@dataclass(frozen=True)
class Report:
    """One report.

    Args:
        step: finished steps.
        metrics: evaluation metrics by name, and `step`, `epoch` and `rows` over the whole life of the trial.
        checkpoint: name of the newest checkpoint, "" if there is none.
    """

    step: int
    metrics: dict[str, float]
    checkpoint: str


@dataclass
class Reports:
    """Makes reports of events.

    Args:
        is_saved_at: whether a checkpoint of these finished steps is made, without regard to its being the best.
    """

    is_saved_at: Callable[[int], bool]
    run: kinds.RunStarted | None = None
    _waiting: kinds.EvaluationDone | None = None
    _checkpoint: str = ""
    _loss: float | None = None

    def take(self, event: kinds.Event) -> list[Report]:
        """The reports that are due after one more event, oldest first."""
        if isinstance(event, kinds.RunStarted):
            self.run = event
        elif isinstance(event, kinds.StateRestored):
            self._checkpoint = event.checkpoint
            due = self._flush() if self._waits_for(event.step) else []
            self._waiting = None  # what is not in the checkpoint is done again
            return due
        elif isinstance(event, kinds.StepsDone) and event.losses:
            self._loss = event.losses[-1]
        elif isinstance(event, kinds.EvaluationDone):
            due = self._flush()
            self._waiting = event
            return due if event.is_best or self.is_saved_at(event.step) else due + self._flush()
        elif isinstance(event, kinds.CheckpointSaved):
            self._checkpoint = event.checkpoint
            return self._flush() if self._waits_for(event.step) else []
        elif isinstance(event, kinds.CheckpointFailed):
            return self._flush() if self._waits_for(event.step) else []
        elif isinstance(event, kinds.RunEnded):
            return self._flush()
        return []

    def _waits_for(self, step: int) -> bool:
        return self._waiting is not None and self._waiting.step <= step

    def _flush(self) -> list[Report]:
        done, self._waiting = self._waiting, None
        if done is None or self.run is None:
            return []
        epochs, steps = divmod(done.step, self.run.steps_per_epoch)
        metrics = {
            **({"train/loss": self._loss} if self._loss is not None else {}),
            **done.metrics,
            "step": done.step,
            "epoch": epochs + steps / self.run.steps_per_epoch if steps else epochs,
            "rows": epochs * self.run.rows_per_epoch + min(steps * self.run.global_batch, self.run.rows_per_epoch),
        }
        return [Report(done.step, metrics, self._checkpoint)]


@dataclass
class Replay:
    """The reports of a run's log, without those of steps that were lost and done again."""

    reports: Reports
    _by_step: dict[int, Report] = field(default_factory=dict)

    def over(self, events: Iterable[kinds.Event], up_to: int) -> list[Report]:
        """The reports of at most `up_to` finished steps, oldest first."""
        for event in events:
            for report in self.reports.take(event):
                self._by_step[report.step] = report
            if isinstance(event, kinds.StateRestored):
                self._by_step = {step: report for step, report in self._by_step.items() if step <= event.step}
        return [report for step, report in sorted(self._by_step.items()) if step <= up_to]
