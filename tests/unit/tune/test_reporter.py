"""Reports: one per evaluation, with its checkpoint, once; and which metrics they have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray import tune
from torch import nn

from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.elastic.placement import ResourceLease
from raytrain.errors import ConfigError
from raytrain.events import kinds
from raytrain.launch.schedule import build_schedule
from raytrain.rundir import RunDir
from raytrain.task import Task
from raytrain.tune import reporter as module
from raytrain.tune.clone import Reference, read_reference
from raytrain.tune.reporter import NUM_PINNED, ReportBuilder, Reporter, check_metric, replay
from tests.golden import check as golden
from tests.support.tasks import Regression

PER_EPOCH = 10


def started() -> kinds.RunStarted:
    shape: dict[str, Any] = {"num_steps": 40, "steps_per_epoch": PER_EPOCH, "rows_per_epoch": 75, "global_batch": 8}
    return kinds.RunStarted(name="trial", directory="", num_logical=1, workers=(1, 1), **shape)


def evaluated(step: int, value: float = 0.5, is_best: bool = False) -> kinds.EvaluationDone:
    return kinds.EvaluationDone(step=step, metrics={"valid/loss": value}, rows=5, seconds=0.1, is_best=is_best)


def saved(step: int) -> kinds.CheckpointSaved:
    return kinds.CheckpointSaved(step=step, checkpoint=f"step-{step}", size_bytes=1, seconds=0.1, stall_s=0.0)


def restored(step: int) -> kinds.StateRestored:
    return kinds.StateRestored(step=step, checkpoint=f"step-{step}" if step else "")


def failed(step: int) -> kinds.CheckpointFailed:
    return kinds.CheckpointFailed(step=step, reason="full")


TRAINED = kinds.StepsDone(first_step=9, losses=[1.5], weights=[1.0], rows=[8], learning_rates=[0.1], finished=[1.0])
ENDED = kinds.RunEnded(outcome="completed", step=5)


def reports_of(*events: kinds.Event) -> list[module.Report]:
    builder = ReportBuilder(is_saved_at=lambda step: step % PER_EPOCH == 0)
    return [report for event in (started(), *events) for report in builder.add(event)]


def test_axes_count_over_the_whole_life_of_a_trial() -> None:
    reports = reports_of(TRAINED, evaluated(10), saved(10), evaluated(14), evaluated(20), saved(20))
    assert reports[0].metrics == {"train/loss": 1.5, "valid/loss": 0.5, "step": 10, "epoch": 1, "rows": 75}
    assert [report.metrics["epoch"] for report in reports] == [1, 1.4, 2]
    assert [report.metrics["rows"] for report in reports] == [75, 75 + 4 * 8, 150], "the last step of an epoch is short"


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        *(([evaluated(10)], []), ([evaluated(10), saved(10)], [(10, "step-10")])),
        ([evaluated(10), saved(10), evaluated(14)], [(10, "step-10"), (14, "step-10")]),
        *(([evaluated(14, is_best=True)], []), ([evaluated(14, is_best=True), saved(14)], [(14, "step-14")])),
        *(([evaluated(10), failed(10)], [(10, "")]), ([evaluated(10), evaluated(20)], [(10, "")])),
        *(([evaluated(10), ENDED], [(10, "")]), ([evaluated(20), saved(10)], []), ([evaluated(20), failed(10)], [])),
        ([evaluated(10), saved(10), evaluated(20), saved(20), restored(10), evaluated(14)], [(14, "step-10")]),
        *(([saved(10), evaluated(10)], [(10, "step-10")]), ([failed(10), evaluated(10)], [(10, "")])),
        ([saved(10), restored(10), evaluated(10)], [(10, "step-10")]),
        ([evaluated(10), restored(10), evaluated(20), saved(20)], [(10, "step-10"), (20, "step-20")]),
    ],
)
def test_a_report_waits_for_its_own_checkpoint_but_not_for_ever(events: Sequence[Any], expected: list[Any]) -> None:
    found = [(report.step, report.checkpoint) for report in reports_of(*events)]
    assert found[-len(expected) :] == expected if expected else found == []


def test_an_evaluation_that_is_repeated_is_reported_once_with_its_new_values() -> None:
    reports = reports_of(evaluated(10, 0.5), restored(0), evaluated(10, 0.4), saved(10))
    assert [report.metrics["valid/loss"] for report in reports] == [0.4]


def test_a_replay_leaves_out_lost_steps_and_steps_after_the_checkpoint() -> None:
    log = [
        *(started(), restored(0), evaluated(10, 0.1), saved(10), evaluated(14, 0.15), evaluated(20, 0.2)),
        *(started(), restored(10), evaluated(20, 0.3), saved(20), evaluated(30, 0.4)),
    ]
    reports = replay(ReportBuilder(lambda step: step % PER_EPOCH == 0), log, up_to=20)
    assert [(report.step, report.metrics["valid/loss"]) for report in reports] == [(10, 0.1), (20, 0.3)]


def test_a_killed_run_reports_the_checkpoint_that_it_had_not_logged() -> None:
    builder = ReportBuilder(lambda step: True)
    reports = replay(builder, [started(), restored(0), evaluated(10, 0.1)], up_to=10)
    reports += [report for event in (started(), restored(10)) for report in builder.add(event)]
    assert [(report.step, report.metrics["valid/loss"]) for report in reports] == [(10, 0.1)]


# The reporter


class Scene:
    """A reporter of a run of 40 steps, 10 per epoch; what it sends to Ray Tune and to the broker."""

    def __init__(self, tmp_path: Path) -> None:
        self.config = RunConfig(name="trial-0001", storage=str(tmp_path), best="min:valid/loss")
        self.run_dir = RunDir.at(str(tmp_path), "trial-0001")
        self.store = CheckpointStore(self.run_dir)
        self.sent: list[tuple[Any, Any]] = []
        self.values: list[Any] = []
        self.ends_at = 0

    def reporter(self, known: int = 0, required: str = "valid/loss", **changed: Any) -> Reporter:
        broker = SimpleNamespace(report=SimpleNamespace(remote=lambda *arguments: self.values.append(arguments)))
        config = RunConfig(**self.config.model_dump() | changed)
        reporter = Reporter(config, required, ResourceLease(broker, "sweep/trial-0001", None, (1,)), known, self.report)
        reporter.on_events([started()])
        return reporter

    def report(self, metrics: dict[str, Any], checkpoint: tune.Checkpoint | None = None) -> None:
        self.sent.append((metrics["step"], read_reference(checkpoint)))
        if metrics["step"] == self.ends_at:
            raise SystemExit

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.sent]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_each_evaluation_is_sent_once_with_a_reference_to_its_checkpoint(scene: Scene) -> None:
    reporter = scene.reporter()
    reporter.on_events([evaluated(10, 0.5), saved(10)])
    reporter.on_events([evaluated(10, 0.5), saved(10), evaluated(20, 0.4), saved(20)])
    place = scene.config.storage, "trial-0001"
    assert scene.sent == [(step, Reference(*place, step, f"step-{step}")) for step in (10, 20)]
    assert scene.values == [("sweep/trial-0001", 10, 0.5), ("sweep/trial-0001", 20, 0.4)]


def test_retention_keeps_the_checkpoints_that_were_reported_last(scene: Scene) -> None:
    reporter, last = scene.reporter(), 10 * (NUM_PINNED + 1)
    for step in range(10, last + 1, 10):
        reporter.on_events([evaluated(step), saved(step)])
    assert scene.store.pinned() == {f"step-{step}" for step in range(20, last + 1, 10)}


def test_a_checkpoint_is_pinned_before_ray_tune_knows_it(scene: Scene) -> None:
    reporter, scene.ends_at = scene.reporter(), 10
    with pytest.raises(SystemExit):
        reporter.on_events([evaluated(10), saved(10)])
    assert scene.store.pinned() == {"step-10"}
    reporter.on_events([evaluated(20), saved(20), kinds.RunEnded(outcome="stopped", step=20)])
    assert scene.steps == [10], "after Ray Tune has ended the trial, nothing is sent"


def test_a_report_without_a_checkpoint_has_no_reference(scene: Scene) -> None:
    scene.reporter().on_events([evaluated(10), failed(10)])
    assert (scene.sent, scene.store.pinned()) == ([(10, None)], frozenset())


def test_the_last_step_is_saved_whatever_checkpoint_every_is(scene: Scene) -> None:
    reporter, found = scene.reporter(checkpoint_every=25), []
    for events in ([evaluated(25)], [saved(25), evaluated(30), evaluated(40)], [saved(40)]):
        reporter.on_events(events)
        found.append(list(scene.steps))
    assert found == [[], [25, 30], [25, 30, 40]]


def test_r15_an_evaluation_without_the_required_metric_is_refused(scene: Scene) -> None:
    with pytest.raises(ConfigError) as refused:
        scene.reporter(required="valid/accuracy").on_events([evaluated(10), saved(10)])
    golden("errors/tune_metric_never_reported.txt", f"{refused.value}\n")
    assert scene.sent == []


def test_a_trial_of_a_plain_tuner_may_lack_the_metric_of_run_best(scene: Scene) -> None:
    scene.reporter(required="", best="max:valid/accuracy").on_events([evaluated(10), saved(10)])
    assert (scene.steps, scene.values) == ([10], [])


def test_a_killed_trial_reports_up_to_its_checkpoint(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    log = [started(), *(event for step in (10, 20) for event in (evaluated(step), saved(step))), evaluated(30, 0.1)]
    monkeypatch.setattr(module, "read", lambda run_dir: log)
    scene.reporter().replay(scene.run_dir)
    assert scene.steps == [], "without a checkpoint all of it is repeated"
    scene.store.write(20, {"state.pt": b""}, {}, {})
    scene.reporter(known=10).replay(scene.run_dir)
    assert scene.steps == [20]


# The metrics of a task


class Enormous(Regression):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 10**9), nn.Linear(10**9, 10**6), nn.Linear(10**6, 1))


class NeedsValues(Regression):
    """Its metrics cannot run without values."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"mae" if model(batch["x"]).sum().item() > 0 else "other": torch.zeros(1)}


class TrainsOnly(Regression):
    def data(self) -> dict[str, Any]:
        return {"train": super().data()["train"]}


class LossOnly(Regression):
    metrics = Task.metrics


class Transformed(Regression):
    """Its metrics need a column that its transform makes."""

    def transform(self, columns: Any) -> Any:
        return {**columns, "twice": columns["y"] * 2}

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"twice": (model(batch["x"]) - batch["twice"]).abs().mean()}


class Summarised(Regression):
    """Its metrics have other names than what is reported."""

    def summarise(self, sums: Any) -> dict[str, Any]:
        return {"f1": sums["right"] / sums["rows"]}


class TwoSources(Regression):
    def data(self) -> dict[str, Any]:
        return {**super().data(), "test": super().data()["valid"]}


def check(metric: str, task: Task) -> None:
    check_metric(metric, task, build_schedule(task, RunConfig()))


@pytest.mark.parametrize(
    ("task", "metric"),
    [
        *((Regression(), "valid/mae"), (Regression(), "valid/loss"), (Enormous(), "valid/mae")),
        *((NeedsValues(), "valid/anything"), (Summarised(), "valid/f1")),  # the first evaluation checks it
        *((LossOnly(), "valid/loss"), (Transformed(), "valid/twice"), (TwoSources(), "test/mae")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_metric_of_the_task_is_known_without_a_forward_pass(task: Task, metric: str) -> None:
    before = torch.get_rng_state()
    check(metric, task)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("task", "metric", "known"),
    [
        *((Regression(), metric, "valid/loss, valid/mae") for metric in ("valid/mape", "test/mae", "mae", "", "train/loss")),
        *((NeedsValues(), "test/anything", "valid/anything, valid/loss"), (LossOnly(), "valid/mae", "valid/loss")),
        (Transformed(), "valid/mae", "valid/loss, valid/twice"),
        (TwoSources(), "test/mape", "valid/loss, valid/mae, test/loss, test/mae"),
    ],
)
def test_r15_a_metric_that_no_trial_reports_is_refused(task: Task, metric: str, known: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(metric, task)
    assert refused.value.rule == f"is a metric that a trial reports: {known}"
    if metric == "valid/mape":
        golden("errors/tune_unknown_metric.txt", f"{refused.value}\n")


def test_a_task_that_evaluates_nothing_cannot_be_searched() -> None:
    with pytest.raises(ConfigError) as refused:
        check("valid/loss", TrainsOnly())
    golden("errors/tune_nothing_evaluated.txt", f"{refused.value}\n")
