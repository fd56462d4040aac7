"""R15 on real Ray: trials share the workers of a cluster and nothing else, and the workers do not change the outcome."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, HyperBandScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.schedulers.pb2 import PB2

import raytrain
from raytrain.checkpoint.store import CheckpointStore
from raytrain.errors import FourPartError
from raytrain.events.curve import curve
from raytrain.events.kinds import EvaluationDone, GenerationFormed, RunEnded, StateRestored, StepsDone
from raytrain.events.log import read
from raytrain.events.sweep import SweepView
from raytrain.rundir import RUN, RunDir
from raytrain.tune import trial as module
from raytrain.tune.clone import Reference, clone
from raytrain.tune.results import NullViewer, SweepResult
from tests.laws.compare import settings
from tests.support.local import LocalRun, Plot
from tests.support.replayed import EPOCH, METRIC, replay_trial
from tests.support.tasks import Gated

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("small_ray")]

MOVE_LIMIT_S = 12.0  # 5 s, and 7 for a machine that is busy with starting other processes


class Watcher(NullViewer):
    """Opens the gate once the condition holds."""

    def __init__(self, gate: Path, condition: Callable[[SweepView], bool]) -> None:
        self.gate, self.condition = gate, condition

    def show(self, view: SweepView, now: float) -> None:
        if self.gate.exists() and self.condition(view):
            self.gate.unlink()


class StopsOne(FIFOScheduler):
    """Stops the trial with one learning rate after its first epoch."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        is_due = trial.config["lr"] == self.lr and result["epoch"] >= 1
        return str(TrialScheduler.STOP if is_due else TrialScheduler.CONTINUE)


def events_of(directory: Path, trial: int) -> list[Any]:
    return list(read(RunDir.at(str(directory), f"trial-{trial:04d}")))


def evaluations(events: Sequence[Any]) -> dict[int, float]:
    return {event.step: event.metrics[METRIC] for event in events if isinstance(event, EvaluationDone)}


def local_run(lr: float, directory: Path, **more: Any) -> LocalRun:
    """The run of a trial, without Ray and without others."""
    run = LocalRun(Gated(lr=lr), settings(storage=str(directory), **more), directory, Plot(1))
    run.run()
    return run


def moves(directory: Path) -> list[float]:
    """Seconds from the end of the stopped trial, number 2, until the first two had more workers; infinity for never."""
    ended = [event.time for event in events_of(directory, 2) if isinstance(event, RunEnded) and event.outcome == "stopped"]
    return [grown_at(events_of(directory, number), ended[0]) - ended[0] if ended else float("inf") for number in (0, 1)]


def grown_at(events: Sequence[Any], after: float) -> float:
    """When a run first had more workers than before, after that time."""
    pairs = itertools.pairwise(event for event in events if isinstance(event, GenerationFormed))
    return min((b.time for a, b in pairs if len(b.members) > len(a.members) and b.time > after), default=float("inf"))


def test_r15_trials_share_only_workers_which_move_from_a_stopped_trial_to_another(tmp_path: Path, gate: Path) -> None:
    directory = tmp_path / "sweep"
    config = settings(name="sweep", storage=str(tmp_path), workers=(1, 3), best=f"min:{METRIC}")

    def has_moved(view: SweepView) -> bool:
        return len(view.trials) == 4 and view.trials[2].state == "stopped" and min(moves(directory)) < float("inf")

    space, fixed = {"lr": tune.grid_search([0.05, 0.0, 0.02, -1.0])}, {"gate": str(gate)}
    sweep = raytrain.Sweep(Gated, space, config=config, fixed=fixed, trials=1, scheduler=StopsOne(0.02))
    result = sweep.fit(Watcher(gate, has_moved))
    trials = result.view.trials
    assert [trial.state for trial in trials] == ["completed", "completed", "stopped", "failed"]
    assert "Invalid learning rate" in trials[3].message
    assert (result.outcome, result.num_failed, len(result.grid)) == ("completed", 1, 4)
    assert min(moves(directory)) <= MOVE_LIMIT_S

    assert len(set(dict(trials[1].curve).values())) == 1, "nothing is learned with a learning rate of 0"
    for number, lr, epochs in ((0, 0.05, 3), (2, 0.02, 1)):
        expected = evaluations(list(read(local_run(lr, tmp_path / "plain", name=f"alone-{number}").run_dir)))
        found = dict(trials[number].curve)
        assert list(found) == [EPOCH * (epoch + 1) for epoch in range(epochs)]
        np.testing.assert_allclose(list(found.values()), [expected[step] for step in found], rtol=1e-6)
    for number in (0, 1):
        events = events_of(directory, number)
        assert [event.step for event in events if isinstance(event, StateRestored)] == [0], "no run was restarted"
        done = [e.first_step + i for e in events if isinstance(e, StepsDone) for i in range(len(e.losses))]
        assert done == list(range(3 * EPOCH)), "no step was lost or repeated"

    assert result.best is not None
    assert (result.best.name, result.best.values["lr"]) == ("trial-0000", 0.05)
    assert Path(result.best.checkpoint, "manifest.json").exists()
    assert list(result.table["state"]) == [trial.state for trial in trials]
    np.testing.assert_allclose(result.table[METRIC][0], min(value for _, value in trials[0].curve))


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"best": "min:valid/nothing"}, "sweep.metric"),
        ({"best": "min:test/mae"}, "sweep.metric"),
        ({"workers": (9, 9), "logical_workers": 9}, "run.workers"),
        ({"elasticity": "restart"}, "run.elasticity"),
    ],
    ids=["metric", "source", "cluster", "restart"],
)
def test_r15_what_cannot_work_is_refused_before_the_first_trial(tmp_path: Path, more: dict[str, Any], where: str) -> None:
    config = settings(**{"name": "sweep", "storage": str(tmp_path), "best": f"min:{METRIC}", **more})
    with pytest.raises(FourPartError) as refused:
        raytrain.Sweep(Gated, {"lr": tune.uniform(0.01, 0.1)}, config=config, trials=2).fit()
    assert refused.value.where == where
    assert not list(tmp_path.glob("sweep/trial-*"))


# Schedulers and searchers, on trials that replay a curve


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "run_trial", replay_trial)


def replayed_sweep(tmp_path: Path, scheduler: Any, lr: Any, trials: int = 1, epochs: int = 3, **more: Any) -> SweepResult:
    """One trial at a time, so that what the scheduler does is always the same."""
    config = settings(name="sweep", storage=str(tmp_path), workers=1, cpus_per_worker=2, epochs=epochs, best=f"min:{METRIC}")
    return raytrain.Sweep(Gated, {"lr": lr}, config=config, trials=trials, scheduler=scheduler, **more).fit()


def check_reports(result: SweepResult) -> None:
    """No step and no report is missing or repeated over pauses."""
    for trial in result.view.trials:
        events = list(read(RunDir.at(result.directory, trial.name)))
        assert list(curve(events)) == list(range(len(curve(events))))
        assert dict(trial.curve) == evaluations(events)
        assert [step for step, _ in trial.curve] == [EPOCH * (i + 1) for i in range(len(trial.curve))]


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize(
    ("scheduler", "num_epochs"),
    [
        (ASHAScheduler(time_attr="epoch", max_t=3, grace_period=1, reduction_factor=2), [3, 1, 3, 1]),
        (HyperBandScheduler(time_attr="epoch", max_t=3, reduction_factor=3), None),
    ],
    ids=["asha", "hyperband"],
)
def test_r15_schedulers_stop_the_trials_with_the_worst_metric(tmp_path: Path, scheduler: Any, num_epochs: Any) -> None:
    result = replayed_sweep(tmp_path, scheduler, tune.grid_search([0.03, 0.01, 0.05, 0.02]))
    check_reports(result)
    lengths = [len(trial.curve) for trial in result.view.trials]
    assert lengths == num_epochs or (num_epochs is None and lengths[2] == 3 and min(lengths) < 3)
    states = {1: "stopped", 2: "stopped", 3: "completed"}
    assert [trial.state for trial in result.view.trials] == [states[length] for length in lengths]
    assert result.best is not None
    assert result.best.values["lr"] == 0.05


@pytest.mark.usefixtures("replayed")
def test_r15_optuna_and_the_median_rule_come_to_their_end(tmp_path: Path) -> None:
    result = replayed_sweep(tmp_path, "median", tune.loguniform(1e-3, 1e-1), trials=4, search="optuna")
    check_reports(result)
    assert {trial.state for trial in result.view.trials} <= {"completed", "stopped"}
    assert len({trial.values["lr"] for trial in result.view.trials}) == 4


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("kind", ["pbt", "pb2"])
def test_r15_a_clone_continues_from_the_step_and_the_weights_of_its_origin(tmp_path: Path, kind: str) -> None:
    given: dict[str, Any] = {"time_attr": "epoch", "perturbation_interval": 2, "quantile_fraction": 0.5, "synch": True}
    scheduler = (
        PopulationBasedTraining(**given, hyperparam_mutations={"lr": [0.04, 0.06]}, resample_probability=1.0)
        if kind == "pbt"
        else PB2(**given, hyperparam_bounds={"lr": [0.01, 0.1]})
    )
    result = replayed_sweep(tmp_path, scheduler, tune.grid_search([0.0, 0.05]), epochs=4)
    assert [trial.state for trial in result.view.trials] == ["completed"] * 2
    events, origin = events_of(tmp_path / "sweep", 0), evaluations(events_of(tmp_path / "sweep", 1))
    restored = next(event for event in events if isinstance(event, StateRestored) and event.step)
    assert (restored.step, result.view.trials[0].curve[-1][0]) == (2 * EPOCH, 4 * EPOCH)
    after = [event for event in events[events.index(restored) :] if isinstance(event, StepsDone)]
    assert after[0].losses[0] == pytest.approx(origin[2 * EPOCH]), "it has its origin's weights"
    assert after[0].learning_rates[0] in (0.04, 0.06) or kind == "pb2"
    assert after[0].learning_rates[0] >= 0.01, "not its own old one"


def test_r15_a_clone_has_a_learning_rate_of_its_own_on_the_schedule(tmp_path: Path) -> None:
    origin = local_run(0.05, tmp_path, name="origin", epochs=4, keep_newest=4)
    origin.run_dir.write_json({"run": origin.config.model_dump(mode="json")}, RUN)
    checkpoint = next(one for one in CheckpointStore(origin.run_dir).list() if one.step == 2 * EPOCH)
    config = settings(storage=str(tmp_path), name="clone", epochs=4)
    reference = Reference(str(tmp_path), "origin", checkpoint.step, checkpoint.name)
    assert clone(reference, RunDir.at(str(tmp_path), "clone"), config, {"lr": 0.02}) == 2 * EPOCH
    cloned = local_run(0.02, tmp_path, name="clone", epochs=4)
    steps = curve(read(cloned.run_dir))
    assert list(steps) == list(range(2 * EPOCH, 4 * EPOCH)), "the data continue where the origin's were"
    base = [10 * record.learning_rate / ((1 + np.cos(np.pi * step / (4 * EPOCH))) / 2) for step, record in steps.items()]
    np.testing.assert_allclose(base, 0.02, rtol=1e-6)


@pytest.mark.usefixtures("replayed")
def test_r15_a_plain_tuner_runs_elastic_trials_and_refuses_unknown_keys(tmp_path: Path) -> None:
    config = settings(storage=str(tmp_path / "runs"), workers=1, cpus_per_worker=2, best=f"min:{METRIC}")
    where = tune.RunConfig(name="plain", storage_path=str(tmp_path / "tune"), verbose=0)

    def tuner(space: dict[str, Any]) -> tune.Tuner:
        scheduler = ASHAScheduler(time_attr="epoch", max_t=3, grace_period=1, reduction_factor=2)
        how = tune.TuneConfig(metric=METRIC, mode="min", scheduler=scheduler)
        return tune.Tuner(raytrain.trainable(Gated, config), param_space=space, tune_config=how, run_config=where)

    with pytest.raises(FourPartError, match=r"sweep.space.rate[\s\S]*did you mean"):
        tuner({"rate": tune.grid_search([0.05])}).fit()
    assert not (tmp_path / "runs").exists()
    try:
        grid = tuner({"lr": tune.grid_search([0.05, 0.0]), "run.clip_norm": 0.5}).fit()
    finally:
        ray.kill(ray.get_actor("raytrain-broker/plain"))  # otherwise it exits a while after the last trial
    assert not grid.errors
    assert [result.metrics["step"] for result in grid] == [3 * EPOCH, EPOCH]
    for result in grid:
        step = result.metrics["step"]
        assert (result.metrics["epoch"] * EPOCH, result.metrics["rows"]) == (step, result.metrics["epoch"] * 203)
        events = list(read(RunDir.at(str(tmp_path / "runs" / "plain"), Path(result.path).name)))
        assert evaluations(events)[step] == result.metrics[METRIC]
        assert Path(result.checkpoint.path, "raytrain.json").stat().st_size < 1000, "a checkpoint is passed by reference"
