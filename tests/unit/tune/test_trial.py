"""A trial: its task and settings, what Ray Tune reserves for it, and which run it continues."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest

from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.elastic import contract
from raytrain.elastic.placement import ResourceLease
from raytrain.errors import ConfigError, ResumeError
from raytrain.rundir import RUN, RunDir
from raytrain.tune import trial as module
from raytrain.tune.clone import Reference
from raytrain.tune.reporter import Reporter
from raytrain.tune.trial import HEAD, JoinRun, SweepOptions, TrialTemplate, pack, smallest_group, trainable, unpack
from tests.golden import check
from tests.support.tasks import Gated, Regression


def make(rate: float, gate: str = "") -> Gated:
    return Gated(lr=rate * 2, gate=gate)


def test_values_are_fields_of_the_task_and_settings_of_the_run() -> None:
    template = TrialTemplate.of(Gated, RunConfig(epochs=2, seed=1, storage="here"), {"gate": "g", "lr": 0.1})
    values = {"lr": np.float32(0.5), "run.global_batch": np.int64(32), "run.seed": 7}
    task, config = template.resolve(values, name="trial-0001")
    assert (task, config.global_batch, config.seed, config.name) == (Gated(lr=0.5, gate="g"), 32, 7, "trial-0001")
    seen: list[type] = []
    TrialTemplate.of(lambda rate: seen.append(type(rate)) or Gated()).resolve({"rate": np.float32(0.5)})
    assert (seen, type(config.global_batch)) == ([float], int), "numpy scalars become Python numbers"
    assert template.resolve(values, epochs=5)[1].epochs == 5
    template = TrialTemplate.of(make, None, {"gate": "g"})
    assert (template.fields, template.resolve({"rate": 0.1})[0]) == (["rate", "gate"], Gated(lr=0.2, gate="g"))
    assert config.storage == str(Path("here").absolute()), "trials run elsewhere"
    assert TrialTemplate.of(Gated, RunConfig(storage="s3://bucket/runs")).config.storage == "s3://bucket/runs"


@pytest.mark.parametrize(
    ("task", "values", "where"),
    [
        (Regression, {"lrr": 0.1}, "sweep.space.lrr"),
        (Regression, {"run.global_bach": 1}, "sweep.space.run.global_bach"),
        *((Regression, {"run.name": "x"}, "sweep.space.run.name"), (Regression, {"lr": "quick"}, "lr")),
        *((Regression, {"run.global_batch": -1}, "run.global_batch"), (make, {"rat": 0.1}, "sweep.space.rat")),
    ],
)
def test_r15_a_wrong_key_or_value_is_refused_before_the_trial_starts(task: Any, values: Any, where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        smallest_group(pack(TrialTemplate.of(task, RunConfig(accelerator="cpu"))), values)
    assert refused.value.where == where


def test_a_packed_template_is_itself_here_and_equal_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    template = TrialTemplate.of(Gated, RunConfig(epochs=2), {"gate": "g"})
    packed = pack(template)
    assert unpack(packed) is template
    monkeypatch.setattr(module, "_templates", {})
    assert unpack(packed) is unpack(packed), "once per process"
    assert unpack(packed).resolve({"lr": 0.5}) == template.resolve({"lr": 0.5})


@pytest.mark.parametrize(
    ("settings", "values", "workers"),
    [
        ({"workers": (2, 8), "accelerator": "cpu", "cpus_per_worker": 3}, {"lr": 0.1}, [{"CPU": 3.0}] * 2),
        ({"workers": 1, "accelerator": "gpu"}, {"lr": 0.1}, [{"CPU": 1.0, "GPU": 1.0}]),
        ({"workers": (1, 8), "accelerator": "cpu"}, {"run.cpus_per_worker": 2}, [{"CPU": 2.0}]),
    ],
)
def test_ray_tune_reserves_the_smallest_group_and_a_place_on_the_head(settings: Any, values: Any, workers: Any) -> None:
    function: Any = trainable(Regression, RunConfig(**settings))
    for one in (function, cloudpickle.loads(cloudpickle.dumps(function))):
        assert one._resources(values).bundles == [HEAD, *workers]
    assert function.__mixins__ == (JoinRun,)


def test_the_trainable_runs_its_template(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(module, "run_trial", lambda *arguments: calls.append(arguments))
    template, options = TrialTemplate.of(Regression), SweepOptions("best", 4, "valid/loss")
    module.as_trainable(template, options)({"lr": 0.1})
    assert calls == [(template, options, {"lr": 0.1})]


def test_r15_trials_share_workers_in_place_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    module.check_elasticity(RunConfig())
    with pytest.raises(ConfigError) as refused:
        trainable(Regression, RunConfig(elasticity="restart"))
    check("errors/tune_restart.txt", f"{refused.value}\n")
    with pytest.raises(ConfigError) as refused:
        trainable(Regression, RunConfig(spares=1))
    check("errors/tune_spares.txt", f"{refused.value}\n")
    monkeypatch.setattr(contract, "violations", lambda: ["WorkerGroup.poll_status: not there"])
    with pytest.raises(ConfigError) as refused:
        module.check_elasticity(RunConfig())
    check("errors/tune_another_ray.txt", f"{refused.value}\n")


# The trial itself


class Stage:
    """A process of Ray Tune with a stand-in for `Trainer`."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storage, self.fits, self.reference = f"{tmp_path}/sweep", list[Any](), None
        self.own = RunDir.at(self.storage, "trial-0001")
        self.on_fit: Callable[[], None] = lambda: None
        stage = self

        class Trainer:
            def __init__(self, task: Any, config: RunConfig, lease: ResourceLease) -> None:
                self.arguments, self.run_dir = (task, config, lease), stage.own

            def fit(self, reporter: Reporter) -> None:
                stage.fits.append((*self.arguments, reporter))
                stage.on_fit()

        context = SimpleNamespace(get_experiment_name=lambda: "sweep", get_trial_dir=lambda: "/tune/sweep/trial-0001")
        tune = SimpleNamespace(get_context=lambda: context, get_checkpoint=lambda: "checkpoint")
        util = SimpleNamespace(get_current_placement_group=lambda: "the trial's own")
        self.make_trainer: Any = Trainer
        stand_ins: dict[str, Any] = {"tune": tune, "ray": SimpleNamespace(util=util)}
        stand_ins |= {"broker_of": lambda *arguments: arguments, "read_reference": lambda checkpoint: self.reference}
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(module, name, stand_in)
        monkeypatch.setattr(JoinRun, "thread", None)
        monkeypatch.setenv("TUNE_ORIG_WORKING_DIR", str(tmp_path))
        monkeypatch.chdir(tmp_path)

    def run(self) -> None:
        config = RunConfig(storage=str(Path(self.storage).parent), workers=(2, 4), best="max:valid/mae", resume="must")
        module.run_trial(TrialTemplate.of(Regression, config), SweepOptions("best", 6), {"lr": 0.5}, self.make_trainer)

    def refuse(self) -> None:
        if self.own.exists(RUN):
            raise ResumeError("run", "lr: 0.1 -> 0.5", "rule", "fix")


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_a_trial_is_a_run_below_the_sweeps_directory_with_a_lease(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    stage.run()
    ((task, config, lease, _),) = stage.fits
    assert (task, config.storage, config.name) == (Regression(lr=0.5), stage.storage, "trial-0001")
    assert config.resume == "auto", "a trial continues whatever the sweep's own run.resume is"
    assert lease == ResourceLease(("sweep", "best", "max", 6), "sweep/trial-0001", "the trial's own", (1, 2))
    assert Path.cwd() == tmp_path, "relative paths are those of the job"
    assert JoinRun.thread is threading.current_thread()


def test_a_trial_that_ray_tune_does_not_know_begins_anew(stage: Stage) -> None:
    stage.own.write_json({}, RUN)
    stage.on_fit = stage.refuse
    stage.run()
    assert (len(stage.fits), stage.own.exists(RUN)) == (2, False)


def test_a_trial_that_ray_tune_knows_is_never_deleted(stage: Stage) -> None:
    stage.own.write_json({}, RUN)
    stage.reference = Reference(stage.storage, "trial-0001", 20, "step-000000020")
    stage.on_fit = stage.refuse
    with pytest.raises(ResumeError):
        stage.run()
    assert (len(stage.fits), stage.own.exists(RUN)) == (1, True)


def test_another_trials_checkpoint_is_cloned(stage: Stage) -> None:
    other = RunDir.at(stage.storage, "trial-0000")
    other.write_json({"run": RunConfig().model_dump(mode="json")}, RUN)
    CheckpointStore(other).write(30, {"state.pt": b"theirs"}, {}, {})
    stage.reference = Reference(stage.storage, "trial-0000", 20, "step-000000020")
    stage.run()
    assert [checkpoint.step for checkpoint in CheckpointStore(stage.own).list()] == [30]
    assert stage.fits[0][-1].known == 30, "retention has deleted the one of step 20"


def test_the_actor_of_a_trial_exits_after_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned, ended = threading.Event(), list[bool]()

    class OfRayTune:
        def cleanup(self) -> None:
            cleaned.set()

    class Actor(JoinRun, OfRayTune):
        pass

    monkeypatch.setattr(JoinRun, "thread", None)
    Actor().cleanup()
    cleaned.clear()
    run = threading.Thread(target=lambda: ended.append(cleaned.wait(5)))
    monkeypatch.setattr(JoinRun, "thread", run)
    run.start()
    Actor().cleanup()
    assert ended == [True]
