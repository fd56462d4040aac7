"""The view of a sweep that Ray Tune's loop keeps up to date, `sweep.json`, and the outcome."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler
from torch import nn

from raytrain.checkpoint.store import CheckpointStore
from raytrain.elastic.membership import Demand
from raytrain.errors import ResourceError
from raytrain.events.sweep import COMPLETED, FAILED, STOPPED, SweepView, TrialView
from raytrain.rundir import RUN, RunDir
from raytrain.tune import results as module
from raytrain.tune.results import UPDATE_EVERY_S, WRITE_EVERY_S, SweepCallback, SweepResult, best_trial
from tests.golden import check

METRIC = "valid/loss"


def trial(number: int, status: str, error: Any = None, **config: Any) -> Any:
    made = SimpleNamespace(trial_id=f"id{number}", experiment_tag=f"{number}_lr=0.1", status=status)
    made.config, made.get_error = config, lambda: error
    made.is_finished = lambda: status in (Trial.TERMINATED, Trial.ERROR)
    return made


RUNNING, PENDING = trial(0, Trial.RUNNING), trial(1, Trial.PENDING)


class Scene:
    """The callback of a sweep of two trials of 40 steps each."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.demands: dict[str, Demand] = {}
        self.shown: list[SweepView] = []
        self.now = 1000.0
        self.directory = RunDir.at(str(tmp_path), "sweep")
        self.file = tmp_path / "sweep" / "sweep.json"
        for number in (0, 1):
            self.directory.write_json({"num_steps": 40}, f"trial-000{number}", RUN)
        self.ray = SimpleNamespace(wait=lambda calls, timeout: (calls, []), get=lambda call: call)
        self.ray.cluster_resources = lambda: {"CPU": 2.0}
        monkeypatch.setattr(module, "ray", self.ray)
        self.callback = self.make()

    def make(self) -> SweepCallback:
        view = SweepView(name="sweep", directory="", metric=METRIC, mode="min", num_trials=2, started=1000.0)
        broker = SimpleNamespace(demands=SimpleNamespace(remote=lambda: self.demands))
        viewer: Any = SimpleNamespace(show=lambda view, now: self.shown.append(view))
        where: Any = (self.directory, FIFOScheduler(), broker, viewer)
        return SweepCallback(view, {"format": 1}, *where, ({"CPU": 1.0}, 4, 60.0), clock=lambda: self.now)

    def step(self, *trials: Any, after_s: float = 1.0) -> tuple[TrialView, ...]:
        self.now += after_s
        self.callback.on_step_begin(0, list(trials))
        return self.shown[-1].trials

    def result(self, one: Any, step: int, value: float) -> None:
        self.callback.on_trial_result(0, [one], one, {"step": step, METRIC: value})


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_trials_are_shown_in_order_with_their_workers_and_steps(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.demands = {"sweep/trial-0000": Demand("sweep/trial-0000", 1, 4, {"CPU": 1.0}, num_workers=3, step=17)}
    scene.step(PENDING, RUNNING)
    found = [(one.name, one.state, one.workers, one.step, one.num_steps) for one in scene.step(PENDING, RUNNING)]
    assert found == [("trial-0000", "running", 3, 17, 40), ("trial-0001", "pending", 0, 0, 0)]

    def get(call: Any) -> Any:
        raise ActorDiedError

    monkeypatch.setattr(scene.ray, "get", get)
    assert scene.step(RUNNING)[0].workers == 0, "while the broker is being restarted, nothing is known"


@pytest.mark.parametrize(
    ("one", "step", "state", "message"),
    [
        *((trial(0, Trial.TERMINATED), 40, "completed", ""), (trial(0, Trial.TERMINATED), 30, "stopped", "")),
        *((trial(0, Trial.TERMINATED), 0, "stopped", ""), (trial(0, Trial.PAUSED), 10, "paused", "")),
        (trial(0, Trial.ERROR, SimpleNamespace(cause="ValueError: too fast")), 10, "failed", "ValueError: too fast"),
        (trial(0, Trial.ERROR), 0, "failed", "its process ended"),
    ],
)
def test_each_status_of_ray_tune_has_a_state(scene: Scene, one: Any, step: int, state: str, message: str) -> None:
    scene.demands = {"sweep/trial-0000": Demand("sweep/trial-0000", 1, 4, {"CPU": 1.0}, num_workers=3)}
    if step:
        scene.result(one, step, 0.5)
    for _ in range(2):
        (found,) = scene.step(one)
        assert (found.state, found.message, found.workers) == (state, message, 0)


def test_a_curve_that_resumes_at_an_earlier_step_loses_what_came_after(scene: Scene) -> None:
    for step, value in [(10, 0.9), (20, 0.8), (30, 0.7), (20, 0.6)]:
        scene.result(RUNNING, step, value)
    for result in ({"step": 10}, {METRIC: 0.5}, {"training_iteration": 1}):
        scene.callback.on_trial_result(0, [RUNNING], RUNNING, result)
    assert scene.step(RUNNING)[0].curve == ((10, 0.9), (20, 0.6))


def test_the_curves_and_the_scheduler_are_restored(scene: Scene) -> None:
    scene.result(RUNNING, 10, 0.9)
    scene.callback._scheduler.memory = "rungs"
    state = scene.callback.get_state()
    scene.callback = scene.make()
    scene.callback.set_state(state)
    assert scene.callback.get_state() == state, "a snapshot before the first turn loses nothing"
    assert scene.step(RUNNING)[0].curve == ((10, 0.9),)
    assert scene.callback._scheduler.memory == "rungs"


def test_a_clone_whose_run_has_not_started_has_no_length_yet(scene: Scene) -> None:
    scene.result(PENDING, 10, 0.9)
    Path(scene.directory.child("trial-0001", RUN)).unlink()
    (found,) = scene.step(PENDING)
    assert (found.step, found.num_steps) == (10, 0)


@pytest.mark.parametrize("value", [np.int64(3), nn.ReLU], ids=["numpy", "class"])
def test_the_file_holds_the_facts_and_values_of_any_kind(scene: Scene, value: Any) -> None:
    scene.step(trial(0, Trial.RUNNING, value=value))
    found = json.loads(scene.file.read_text())
    assert found["format"] == 1
    assert str(value) in str(found["view"]["trials"][0]["values"]["value"])


def test_it_updates_a_few_times_a_second_and_writes_less_often(scene: Scene) -> None:
    scene.step(RUNNING)
    scene.file.unlink()
    found = []
    for after_s in (0.0, UPDATE_EVERY_S, WRITE_EVERY_S):
        scene.step(RUNNING, after_s=after_s)
        found.append((len(scene.shown), scene.file.exists()))
    assert found == [(1, False), (2, False), (3, True)]


@pytest.mark.parametrize(
    ("trials", "outcome", "state"),
    [
        ([trial(0, Trial.TERMINATED)], "completed", "stopped"),
        ([trial(0, Trial.TERMINATED), PENDING], "stopped", "stopped"),
        (None, "stopped", "running"),  # Ray Tune has terminated its trials
    ],
)
def test_the_end_is_shown_and_written(scene: Scene, trials: Any, outcome: str, state: str) -> None:
    scene.step(RUNNING)
    scene.callback.end(trials, scene.now)
    for view in (scene.shown[-1].__dict__, json.loads(scene.file.read_text())["view"]):
        first = view["trials"][0]
        assert view["outcome"] == outcome
        assert (first["state"] if isinstance(first, Mapping) else first.state) == state


def test_r15_a_sweep_does_not_wait_for_ever_for_a_cluster_that_is_too_small(scene: Scene) -> None:
    scene.step(PENDING)
    with pytest.raises(ResourceError) as refused:
        scene.step(PENDING, after_s=60)
    check("errors/tune_no_trial_starts.txt", f"{refused.value}\n")
    scene.callback = scene.make()
    scene.step(RUNNING)
    scene.step(PENDING, after_s=600)  # a trial has run


# The outcome

TRIALS = (
    TrialView(name="trial-0000", state=COMPLETED, values={"lr": 0.1}, step=30, curve=((10, 0.4), (20, 0.2), (30, 0.3))),
    TrialView(name="trial-0001", state=STOPPED, values={"lr": 0.2}, step=10, curve=((10, math.nan),)),
    TrialView(name="trial-0002", state=FAILED, values={"lr": 9.0}, message="ValueError: too fast"),
)


def view_of(*trials: TrialView, mode: str = "min") -> SweepView:
    return SweepView(name="sweep", directory="/s", metric=METRIC, mode=mode, num_trials=len(trials), trials=trials)


@pytest.mark.parametrize(("mode", "step", "value"), [("min", 20, 0.2), ("max", 10, 0.4)])
def test_the_best_trial_has_the_best_value_ever_and_its_checkpoint(
    tmp_path: Path, mode: str, step: int, value: float
) -> None:
    assert best_trial(view_of(*TRIALS[1:], mode=mode), str(tmp_path)) is None, "they have no finite value"
    best = best_trial(view_of(*TRIALS, mode=mode), str(tmp_path))
    assert best is not None
    assert best.checkpoint == "", "retention has deleted all"
    store = CheckpointStore(RunDir.at(str(tmp_path), "trial-0000"))
    for saved_step, saved_value in TRIALS[0].curve:
        store.write(saved_step, {"state.pt": b""}, {METRIC: saved_value}, {})
    best = best_trial(view_of(*TRIALS, mode=mode), str(tmp_path))
    assert best is not None
    assert (best.name, best.values, best.step, best.value) == ("trial-0000", {"lr": 0.1}, step, value)
    assert best.directory == f"{tmp_path}/trial-0000"
    assert best.checkpoint == f"{best.directory}/checkpoints/step-{step:09d}"


def test_the_table_has_one_row_per_trial() -> None:
    grid: Any = None
    result = SweepResult("sweep", "/storage/sweep", "completed", None, view_of(*TRIALS), grid)
    rows = result.table.to_dict("records")
    place = {"trial": "trial-0000", "state": "completed", "directory": "/storage/sweep/trial-0000"}
    assert rows[0] == {**place, "lr": 0.1, "step": 30, METRIC: 0.2, "best step": 20.0, "newest": 0.3}
    assert [row["lr"] for row in rows] == [0.1, 0.2, 9.0]
    assert all(math.isnan(row[METRIC]) for row in rows[1:])
    assert result.num_failed == 1
