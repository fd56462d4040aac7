"""What does a trial report to Ray Tune? One result per evaluation: the global metrics, and where the run stands.

A report waits for the checkpoint of its step, if there will be one, so that what the scheduler does next (pause, clone)
has a checkpoint to start from. Runs in the trial's process, but for `check_metric`: the driver calls it before the first
trial.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from ray import tune

from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.data.loader import to_tensors
from raytrain.data.source import Source
from raytrain.elastic.placement import ResourceLease
from raytrain.errors import ConfigError, TaskError
from raytrain.events import kinds
from raytrain.events.log import read
from raytrain.launch.monitor import NullViewer
from raytrain.launch.schedule import Schedule
from raytrain.rundir import RunDir
from raytrain.task import Task
from raytrain.tune.clone import Reference
from raytrain.worker.hooks import own_transform, user_code

NUM_PINNED = 3
"""Reported checkpoints that retention keeps, the last ones: other trials may still clone them."""


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
class ReportBuilder:
    """Makes reports of a run's events.

    Args:
        is_saved_at: whether a checkpoint is due after so many finished steps, whatever the metric.
    """

    is_saved_at: Callable[[int], bool]
    run: kinds.RunStarted | None = None
    _pending: kinds.EvaluationDone | None = None
    _checkpoint: str = ""
    _settled_step: int | None = None  # whose checkpoint is there, or failed
    _loss: float | None = None

    def add(self, event: kinds.Event) -> list[Report]:
        """The reports that are due after one more event, oldest first."""
        if isinstance(event, kinds.RunStarted):
            self.run = event
        elif isinstance(event, kinds.StateRestored):
            self._checkpoint, self._settled_step = event.checkpoint, event.step
            due = self._flush(event.step)
            self._pending = None  # an evaluation after the checkpoint is repeated
            return due
        elif isinstance(event, kinds.StepsDone) and event.losses:
            self._loss = event.losses[-1]
        elif isinstance(event, kinds.EvaluationDone):
            due, self._pending = self._flush(), event
            is_awaited = event.step != self._settled_step and (event.is_best or self.is_saved_at(event.step))
            return due if is_awaited else due + self._flush()
        elif isinstance(event, kinds.CheckpointSaved):
            self._checkpoint, self._settled_step = event.checkpoint, event.step
            return self._flush(event.step)
        elif isinstance(event, kinds.CheckpointFailed):
            self._settled_step = event.step
            return self._flush(event.step)
        elif isinstance(event, kinds.RunEnded):
            return self._flush()
        return []

    def _flush(self, up_to: int | None = None) -> list[Report]:
        """The pending report, if it is of at most `up_to` finished steps."""
        if self._pending is None or (up_to is not None and self._pending.step > up_to):
            return []
        evaluation, self._pending = self._pending, None
        if self.run is None:
            return []
        epochs, steps = divmod(evaluation.step, self.run.steps_per_epoch)
        metrics = {
            **({"train/loss": self._loss} if self._loss is not None else {}),
            **evaluation.metrics,
            "step": evaluation.step,
            "epoch": epochs + steps / self.run.steps_per_epoch if steps else epochs,
            "rows": epochs * self.run.rows_per_epoch + steps * self.run.global_batch,
        }
        return [Report(evaluation.step, metrics, self._checkpoint)]


def replay(builder: ReportBuilder, events: Iterable[kinds.Event], up_to: int) -> list[Report]:
    """The reports of a run's event log of at most `up_to` finished steps, oldest first; none of steps that were lost."""
    by_step: dict[int, Report] = {}
    for event in events:
        by_step |= {report.step: report for report in builder.add(event)}
        if isinstance(event, kinds.StateRestored):
            by_step = {step: report for step, report in by_step.items() if step <= event.step}
    return [report for step, report in sorted(by_step.items()) if step <= up_to]


class Reporter(NullViewer):
    """A viewer of the trial's run that reports to Ray Tune and to the broker.

    Args:
        config: of the run.
        required_metric: raises ConfigError when an evaluation lacks it; "" for none.
        lease: the trial's resources; its broker receives the values of `run.best`.
        known: finished steps up to which Ray Tune has all reports.
        report: `ray.tune.report`.
    """

    def __init__(
        self,
        config: RunConfig,
        required_metric: str,
        lease: ResourceLease,
        known: int,
        report: Callable[..., None] = tune.report,
    ) -> None:
        self._config, self._required_metric, self._lease, self._report = config, required_metric, lease, report
        self.known = known
        self._builder, self._pinned = ReportBuilder(self._is_saved_at), deque[str](maxlen=NUM_PINNED)
        self._store = CheckpointStore(RunDir.at(config.storage, config.name))
        self._has_ended = False

    def replay(self, run_dir: RunDir) -> None:
        """Reports what the run did before, up to its newest checkpoint; later steps are repeated."""
        newest = self._store.newest_verified()
        for report in replay(self._builder, read(run_dir), newest.step if newest else 0):
            self._send(report)

    def on_events(self, events: Sequence[kinds.Event]) -> None:
        for event in events:
            for report in self._builder.add(event):
                self._send(report)

    def _is_saved_at(self, step: int) -> bool:
        run = self._builder.run
        every = self._config.checkpoint_every or (run.steps_per_epoch if run else 1)
        return step % every == 0 or (run is not None and step == run.num_steps)

    def _send(self, report: Report) -> None:
        """Blocks until Ray Tune has decided that the trial continues; raises SystemExit when it ends the trial."""
        if self._has_ended or report.step <= self.known:
            return
        if self._required_metric and self._required_metric not in report.metrics:
            raise _unknown_metric(self._required_metric, [name for name in report.metrics if "/" in name])
        self.known, metric = report.step, self._config.best_metric
        if metric in report.metrics:
            self._lease.broker.report.remote(self._lease.name, report.step, report.metrics[metric])
        try:
            self._report_with_checkpoint(report) if report.checkpoint else self._report(report.metrics)
        except SystemExit:
            self._has_ended = True
            raise

    def _report_with_checkpoint(self, report: Report) -> None:
        self._pinned.append(report.checkpoint)
        self._store.pin(list(self._pinned))
        reference = Reference(self._config.storage, self._config.name, report.step, report.checkpoint)
        with reference.as_checkpoint() as checkpoint:
            self._report(report.metrics, checkpoint=checkpoint)


def check_metric(metric: str, task: Task, work: Schedule) -> None:
    """Checks that a trial reports this metric, as far as that can be known before it runs.

    Raises:
        ConfigError: it does not.
    """
    sources = [name for name in work.sources if name != "train"]
    if not sources:
        rule = "trials are compared by an evaluation: the task's `data` returns another source besides train"
        raise ConfigError("sweep.metric", metric, rule, 'return {"train": ..., "valid": ...}')
    source, _, name = metric.partition("/")
    known = _metric_names(task, work.sources[sources[0]])
    names = sorted({"loss", *({name} if known is None else known)})
    if source not in sources or name not in names:
        raise _unknown_metric(metric or "not given", [f"{one}/{other}" for one in sources for other in names])


def _unknown_metric(metric: str, known: Iterable[str]) -> ConfigError:
    return ConfigError("sweep.metric", metric, f"is a metric that a trial reports: {', '.join(known)}", "choose one of them")


def _metric_names(task: Task, source: Source) -> set[str] | None:
    """The names of the task's metrics; None if they depend on values.

    Runs the task's code on PyTorch's meta device, which needs neither memory nor time.
    """
    if type(task).summarise is not Task.summarise:
        return None
    if type(task).metrics is Task.metrics:
        return set()
    columns = source.take(np.arange(min(2, source.num_rows)))
    try:
        with user_code("metrics"), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            transform = own_transform(task)
            batch = to_tensors(transform(columns) if transform else columns, source.left_out)
            with torch.device("meta"):
                model = task.model().to("meta")
            return set(task.metrics(model, {name: tensor.to("meta") for name, tensor in batch.items()}))
    except TaskError:
        return None
