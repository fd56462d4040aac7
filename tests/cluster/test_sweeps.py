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
from raytrain.errors import FourPartError
from raytrain.events.curve import curve
from raytrain.events.kinds import EvaluationDone, GenerationFormed, RunEnded, RunStarted, StateRestored, StepsDone
from raytrain.events.log import read
from raytrain.events.sweep import SweepView
from raytrain.rundir import RunDir
from tests.laws.compare import settings
from tests.support.local import LocalRun, Plot
from tests.support.tasks import Gated

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_ray")]

METRIC = "valid/mae"
SECONDS_TO_MOVE = 5.0
SLACK_S = 7.0  # for a machine that is busy with starting other processes
EPOCH = 13  # steps


class Watcher:
    """Opens the gate once the test has seen what it waits for."""

    def __init__(self, gate: Path, has_seen: Callable[[SweepView], bool]) -> None:
        self.gate, self.has_seen = gate, has_seen
        self.views: list[SweepView] = []

    def show(self, view: SweepView, now: float) -> None:
        self.views.append(view)
        if self.gate.exists() and self.has_seen(view):
            self.gate.unlink()

    def say(self, text: str, now: float) -> None:
        """Not looked at."""


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


def evaluations(events: Sequence[Any], metric: str = METRIC) -> dict[int, float]:
    return {event.step: event.metrics[metric] for event in events if isinstance(event, EvaluationDone)}


def alone(lr: float, directory: Path, **more: Any) -> dict[int, float]:
    """The same trial as one process without Ray."""
    run = LocalRun(Gated(lr=lr), settings(storage=str(directory), name=f"alone-{lr}", **more), directory, Plot(1))
    run.run()
    return evaluations(list(read(run.run_dir)))


def test_r15_trials_share_nothing_but_workers_which_move_on_when_one_is_stopped_or_fails(tmp_path: Path, gate: Path) -> None:
    rates = [0.05, 0.0, 0.02, -1.0]
    config = settings(name="sweep", storage=str(tmp_path), workers=(1, 3), best=f"min:{METRIC}")

    directory, more = tmp_path / "sweep", {"logical_workers": 4}

    def has_moved(view: SweepView) -> bool:
        return len(view.trials) == 4 and view.trials[2].state == "stopped" and min(moves(directory)) < float("inf")

    watcher = Watcher(gate, has_moved)
    sweep = raytrain.Sweep(
        Gated,
        {"lr": tune.grid_search(rates)},
        config=config,
        fixed={"gate": str(gate)},
        trials=1,
        scheduler=StopsOne(0.02),
    )
    result = sweep.fit(watcher)
    trials = result.view.trials
    assert [trial.state for trial in trials] == ["completed", "completed", "stopped", "failed"]
    assert "Invalid learning rate" in trials[3].message
    assert (result.outcome, result.num_failed, len(result.grid)) == ("completed", 1, 4)
    assert len({trial.name for trial in trials}) == 4

    assert len(set(dict(trials[1].curve).values())) == 1, "nothing is learned with a learning rate of 0"
    for number in (0, 1):
        expected = alone(rates[number], tmp_path / "plain", **more)
        found = dict(trials[number].curve)
        assert found.keys() == expected.keys()
        np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-6)
    stopped = alone(rates[2], tmp_path / "plain", **more)
    for step, value in trials[2].curve:
        np.testing.assert_allclose(value, stopped[step], rtol=1e-6)
    assert trials[2].curve[-1][0] == EPOCH

    assert min(moves(directory)) <= SECONDS_TO_MOVE + SLACK_S
    for number in (0, 1):
        events = events_of(directory, number)
        assert [event.step for event in events if isinstance(event, StateRestored)] == [0], "nobody was restarted"
        done = [e.first_step + i for e in events if isinstance(e, StepsDone) for i in range(len(e.losses))]
        assert done == list(range(3 * EPOCH)), "no step was lost or done again"

    assert result.best is not None
    assert (result.best.name, result.best.values["lr"]) == ("trial-0000", 0.05)
    assert Path(result.best.checkpoint, "manifest.json").exists()
    assert list(result.table["state"]) == [trial.state for trial in trials]
    np.testing.assert_allclose(result.table[METRIC][0], min(value for _, value in trials[0].curve))


def moves(directory: Path) -> list[float]:
    """Seconds from the end of the stopped trial, number 2, until the first two had more workers; infinity for never."""
    ended = [event.time for event in events_of(directory, 2) if isinstance(event, RunEnded) and event.outcome == "stopped"]
    return [grown_at(events_of(directory, number), ended[0]) - ended[0] if ended else float("inf") for number in (0, 1)]


def grown_at(events: Sequence[Any], after: float) -> float:
    """When a run first had more workers than before, after that time."""
    generations = [event for event in events if isinstance(event, GenerationFormed)]
    pairs = itertools.pairwise(generations)
    return min((b.time for a, b in pairs if len(b.members) > len(a.members) and b.time > after), default=float("inf"))


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


@pytest.mark.parametrize("kind", ["pbt", "pb2"])
def test_r15_a_clone_goes_on_at_the_step_of_its_origin_with_a_learning_rate_of_its_own(
    tmp_path: Path, gate: Path, kind: str
) -> None:
    given: dict[str, Any] = {"time_attr": "epoch", "perturbation_interval": 2, "quantile_fraction": 0.5, "synch": True}
    scheduler = (
        PopulationBasedTraining(**given, hyperparam_mutations={"lr": [0.04, 0.06]}, resample_probability=1.0)
        if kind == "pbt"
        else PB2(**given, hyperparam_bounds={"lr": [0.01, 0.1]})
    )
    config = settings(name=kind, storage=str(tmp_path), workers=(1, 1), logical_workers=1, epochs=4, best=f"min:{METRIC}")
    rates = [0.0, 0.05]
    space = {"lr": tune.grid_search(rates)}
    fixed = {"gate": str(gate)}
    result = raytrain.Sweep(Gated, space, config=config, fixed=fixed, trials=1, scheduler=scheduler).fit()
    assert [trial.state for trial in result.view.trials] == ["completed"] * 2
    events = events_of(tmp_path / kind, 0)
    clone = next(event for event in events if isinstance(event, StateRestored) and event.step)
    assert clone.step % EPOCH == 0
    after = events[events.index(clone) :]
    steps = {e.first_step + i: rate for e in after if isinstance(e, StepsDone) for i, rate in enumerate(e.learning_rates)}
    assert min(steps) == clone.step, "the data go on where the origin's were"
    num_steps = 4 * EPOCH
    base = {step: 10 * rate / ((1 + np.cos(np.pi * step / num_steps)) / 2) for step, rate in steps.items()}
    np.testing.assert_allclose(list(base.values()), base[clone.step], rtol=1e-6, err_msg="one rate, on the schedule")
    assert base[clone.step] == pytest.approx(0.04) or base[clone.step] == pytest.approx(0.06) or kind == "pb2"
    assert base[clone.step] * (1 + 1e-9) >= 0.01, "not that of its origin, nor its own old one"
    assert max(steps) == num_steps - 1
    assert evaluations(after)[num_steps] < evaluations(events)[EPOCH], "it has its origin's weights"


@pytest.mark.parametrize(
    ("scheduler", "search"),
    [("median", "optuna"), (HyperBandScheduler(time_attr="epoch", max_t=3, reduction_factor=2), "random")],
    ids=["median-optuna", "hyperband"],
)
def test_r15_other_schedulers_and_searchers_come_to_their_end(tmp_path: Path, scheduler: Any, search: str) -> None:
    config = settings(name="sweep", storage=str(tmp_path), workers=(1, 1), logical_workers=1, best=f"min:{METRIC}")
    space = {"lr": tune.loguniform(1e-3, 1e-1)}
    result = raytrain.Sweep(Gated, space, config=config, trials=4, scheduler=scheduler, search=search).fit()
    states = [trial.state for trial in result.view.trials]
    assert len(states) == 4
    assert set(states) <= {"completed", "stopped"}
    assert "completed" in states
    for trial in result.view.trials:
        events = list(read(RunDir.at(str(tmp_path / "sweep"), trial.name)))
        assert list(curve(events)) == list(range(len(curve(events)))), "no step is missing over pauses"
        assert {step for step, _ in trial.curve} <= evaluations(events).keys()
        assert any(isinstance(event, RunStarted) for event in events)


def test_r15_a_plain_tuner_runs_elastic_trials_and_refuses_unknown_keys_before_the_first_one(tmp_path: Path) -> None:
    config = settings(storage=str(tmp_path / "runs"), workers=(1, 2), logical_workers=2, best=f"min:{METRIC}")
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
        ray.kill(ray.get_actor("raytrain-broker/plain"))  # it would end by itself, a while after the last trial
    assert not grid.errors
    table = grid.get_dataframe()
    assert set(table["step"]) <= {EPOCH, 2 * EPOCH, 3 * EPOCH}
    assert [(row.epoch * EPOCH, row.rows) for row in table.itertuples()] == [
        (r.step, r.epoch * 203) for r in table.itertuples()
    ]
    for result in grid:
        trial = RunDir.at(str(tmp_path / "runs" / "plain"), Path(result.path).name)
        assert evaluations(list(read(trial)))[result.metrics["step"]] == result.metrics[METRIC], "global, of the last report"
        reference = Path(result.checkpoint.path, "raytrain.json").read_text()
        assert len(reference) < 1000, "a checkpoint is passed by reference"
