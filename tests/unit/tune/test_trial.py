"""A trial: which run it carries on, what it tells Ray Tune of it, and what it keeps for others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import tune

from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.elastic.places import Share
from raytrain.errors import ConfigError, ResumeError
from raytrain.events import kinds
from raytrain.rundir import RUN, RunDir
from raytrain.tune import trial as module
from raytrain.tune.recipe import recipe
from raytrain.tune.reference import Reference, read_reference
from raytrain.tune.trial import KEPT, EndsInOrder, Reporter, Terms, run_trial
from tests.golden import check
from tests.support.tasks import Regression
from tests.unit.tune.test_reports import evaluated, saved, started


class Scene:
    """A reporter of a run of 40 steps, 10 per epoch; what it tells Ray Tune, the broker and the store."""

    def __init__(self, tmp_path: Path) -> None:
        self.config = RunConfig(name="trial-0001", storage=str(tmp_path), best="min:valid/loss")
        self.run_dir = RunDir.at(str(tmp_path), "trial-0001")
        self.store = CheckpointStore(self.run_dir)
        self.told: list[tuple[Any, Any]] = []
        self.values: list[Any] = []
        self.ends_at = 0
        broker = SimpleNamespace(tell=SimpleNamespace(remote=lambda *told: self.values.append(told)))
        self.share = Share(broker, "sweep/trial-0001", None, (1,))

    def reporter(self, known: int = 0, must_report: str = "valid/loss") -> Reporter:
        reporter = Reporter(self.config, Terms(must_report=must_report), self.share, known, self.report)
        reporter.on_events([started()])
        return reporter

    def report(self, metrics: dict[str, Any], checkpoint: tune.Checkpoint | None = None) -> None:
        self.told.append((metrics["step"], read_reference(checkpoint)))
        if metrics["step"] == self.ends_at:
            raise SystemExit

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.told]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_each_evaluation_is_told_once_with_its_checkpoint_by_reference(scene: Scene) -> None:
    reporter = scene.reporter()
    reporter.on_events([evaluated(10, 0.5), saved(10)])
    reporter.on_events([evaluated(10, 0.5), saved(10), evaluated(20, 0.4), saved(20)])
    place = scene.config.storage, "trial-0001"
    assert scene.told == [(step, Reference(*place, step, f"step-{step}")) for step in (10, 20)]
    assert scene.values == [("sweep/trial-0001", 10, 0.5), ("sweep/trial-0001", 20, 0.4)]


def test_what_ray_tune_knows_already_is_not_told_again(scene: Scene) -> None:
    scene.reporter(known=20).on_events([event for step in (10, 20, 30) for event in (evaluated(step), saved(step))])
    assert scene.steps == [30]


def test_the_checkpoints_that_were_reported_last_stay(scene: Scene) -> None:
    reporter = scene.reporter()
    for step in range(10, 10 * (KEPT + 2), 10):
        reporter.on_events([evaluated(step), saved(step)])
        assert f"step-{step}" in scene.store.pinned(), "before Ray Tune hears of it"
    assert scene.store.pinned() == {f"step-{step}" for step in range(20, 10 * (KEPT + 2), 10)}


def test_one_without_a_checkpoint_is_told_without_a_reference(scene: Scene) -> None:
    failed = kinds.CheckpointFailed(step=10, reason="full")
    scene.reporter().on_events([evaluated(10), failed])
    assert scene.told == [(10, None)]
    assert scene.store.pinned() == frozenset()


def test_after_ray_tune_has_ended_the_trial_nothing_is_told(scene: Scene) -> None:
    reporter, scene.ends_at = scene.reporter(), 10
    with pytest.raises(SystemExit):
        reporter.on_events([evaluated(10), saved(10)])
    reporter.on_events([evaluated(20), saved(20), kinds.RunEnded(outcome="stopped", step=20)])
    assert scene.steps == [10]
    assert scene.store.pinned() == {"step-10"}


def test_the_last_step_is_saved_though_no_checkpoint_is_due_there(scene: Scene) -> None:
    scene.config = RunConfig(**scene.config.model_dump() | {"checkpoint_every": 25})
    reporter = scene.reporter()
    reporter.on_events([evaluated(25)])
    assert scene.steps == []
    reporter.on_events([saved(25), evaluated(30), evaluated(40)])
    assert scene.steps == [25, 30]
    reporter.on_events([saved(40)])
    assert scene.steps == [25, 30, 40]


def test_r15_a_metric_that_no_evaluation_has_is_refused_and_what_there_is_is_named(scene: Scene) -> None:
    reporter = scene.reporter(must_report="valid/accuracy")
    with pytest.raises(ConfigError) as refused:
        reporter.on_events([evaluated(10), saved(10)])
    check("errors/tune_metric_never_reported.txt", f"{refused.value}\n")
    assert scene.told == []


def test_a_trial_of_a_plain_tuner_need_not_have_the_metric_by_which_it_is_ranked(scene: Scene) -> None:
    scene.config = RunConfig(**scene.config.model_dump() | {"best": "max:valid/accuracy"})
    scene.reporter(must_report="").on_events([evaluated(10), saved(10)])
    assert (scene.steps, scene.values) == ([10], [])


def test_what_a_killed_trial_had_done_is_told_up_to_its_checkpoint(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    log = [started(), *(event for step in (10, 20) for event in (evaluated(step), saved(step))), evaluated(30, 0.1)]
    monkeypatch.setattr(module, "read", lambda run_dir: log)
    scene.reporter().replay(scene.run_dir)
    assert scene.told == [], "without a checkpoint all of it is done again"
    scene.store.write(20, {"state.pt": b""}, {}, {})
    scene.reporter(known=10).replay(scene.run_dir)
    assert scene.steps == [20]


# The trial itself


class Stage:
    """A process of Ray Tune's with a trainer that does nothing but what the test says."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storage, self.fits, self.reference = str(tmp_path), list[Any](), None
        self.on_fit: Callable[[], None] = lambda: None
        stage = self

        class Trainer:
            def __init__(self, task: Any, config: RunConfig, share: Share) -> None:
                self.arguments, self.run_dir = (task, config, share), RunDir.at(config.storage, config.name)

            def fit(self, reporter: Reporter) -> None:
                stage.fits.append((*self.arguments, reporter))
                stage.on_fit()

        context = SimpleNamespace(get_experiment_name=lambda: "sweep", get_trial_dir=lambda: "/tune/sweep/trial-0001")
        fake = SimpleNamespace(get_context=lambda: context, get_checkpoint=lambda: "checkpoint")
        group = SimpleNamespace(get_current_placement_group=lambda: "the trial's own")
        monkeypatch.setattr(module, "tune", fake)
        monkeypatch.setattr(module, "ray", SimpleNamespace(util=group))
        monkeypatch.setattr(module, "Trainer", Trainer)
        monkeypatch.setattr(module, "broker_of", lambda *arguments: arguments)
        monkeypatch.setattr(module, "read_reference", lambda checkpoint: self.reference)
        monkeypatch.setattr(EndsInOrder, "thread", None)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("TUNE_ORIG_WORKING_DIR", str(tmp_path))

    @property
    def own(self) -> RunDir:
        return RunDir.at(f"{self.storage}/sweep", "trial-0001")

    def run(self, **values: Any) -> None:
        made = recipe(Regression, RunConfig(storage=self.storage, workers=(2, 4), best="max:valid/mae", resume="must"))
        run_trial(made, Terms("best", 6), values)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_a_trial_is_a_run_below_the_sweeps_directory_on_places_of_its_own_and_on_the_brokers(stage: Stage) -> None:
    elsewhere = Path(stage.storage, "elsewhere")
    elsewhere.mkdir()
    os.chdir(elsewhere)
    stage.run(lr=0.5)
    ((task, config, share, _),) = stage.fits
    assert (task, config.storage, config.name) == (Regression(lr=0.5), f"{stage.storage}/sweep", "trial-0001")
    assert config.resume == "auto", "a trial goes on whatever the sweep's own run.resume is"
    assert share == Share(("sweep", "best", "max", 6), "sweep/trial-0001", "the trial's own", (1, 2))
    assert Path.cwd() == Path(stage.storage), "paths mean what they mean in the job"
    assert EndsInOrder.thread is threading.current_thread()


def test_a_trial_that_the_sweep_does_not_know_any_more_begins_anew(stage: Stage) -> None:
    stage.own.write_json({}, RUN)

    def refuse_what_is_there() -> None:
        if stage.own.exists(RUN):
            raise ResumeError("run", "lr: 0.1 -> 0.5", "rule", "fix")

    stage.on_fit = refuse_what_is_there
    stage.run(lr=0.5)
    assert len(stage.fits) == 2
    assert not stage.own.exists(RUN)


def test_one_that_ray_tune_knows_is_never_thrown_away(stage: Stage) -> None:
    stage.own.write_json({}, RUN)
    stage.reference = Reference(f"{stage.storage}/sweep", "trial-0001", 20, "step-000000020")

    def refuse() -> None:
        raise ResumeError("run", "lr: 0.1 -> 0.5", "rule", "fix")

    stage.on_fit = refuse
    with pytest.raises(ResumeError):
        stage.run(lr=0.5)
    assert (len(stage.fits), stage.own.exists(RUN)) == (1, True)


def test_another_trials_checkpoint_is_cloned_and_its_reports_are_not_told_as_ones_own(stage: Stage) -> None:
    theirs = RunDir.at(f"{stage.storage}/sweep", "trial-0000")
    theirs.write_json({"run": RunConfig().model_dump(mode="json")}, RUN)
    CheckpointStore(theirs).write(30, {"state.pt": b"theirs"}, {}, {})
    stage.reference = Reference(f"{stage.storage}/sweep", "trial-0000", 20, "step-000000020")
    stage.run(lr=0.5)
    assert [checkpoint.step for checkpoint in CheckpointStore(stage.own).list()] == [30]
    assert stage.fits[0][-1]._known == 30, "the one of step 20 has gone since"


def test_the_process_of_a_trial_stays_until_its_run_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    told_to_end = threading.Event()

    class OfRayTune:
        def cleanup(self) -> None:
            told_to_end.set()

    class Process(EndsInOrder, OfRayTune):
        pass

    done: list[bool] = []
    run = threading.Thread(target=lambda: done.append(told_to_end.wait(5)))
    monkeypatch.setattr(EndsInOrder, "thread", None)
    Process().cleanup()
    told_to_end.clear()
    monkeypatch.setattr(EndsInOrder, "thread", run)
    run.start()
    Process().cleanup()
    assert done == [True]
