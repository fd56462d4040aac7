"""The board: states in a user's words, curves that can fall back, a snapshot, and an end to waiting."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler
from torch import nn

from raytrain.elastic.quota import Claim
from raytrain.errors import ResourceError
from raytrain.events.sweep import SweepView
from raytrain.rundir import RUN, RunDir
from raytrain.tune import board as module
from raytrain.tune.board import LOOK_EVERY_S, WRITE_EVERY_S, Board, name_of
from tests.golden import check

METRIC = "valid/loss"


def trial(number: int, status: str, **more: Any) -> Any:
    given = {"trial_id": f"id{number}", "experiment_tag": f"{number}_lr=0.1", "status": status, "config": {"lr": 0.1}}
    is_finished = status in (Trial.TERMINATED, Trial.ERROR)
    return SimpleNamespace(**given, is_finished=lambda: is_finished, get_error=lambda: more.get("error"))


class Scene:
    """A board of a sweep of two trials of 40 steps each."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.claims: dict[str, Claim] = {}
        self.shown: list[SweepView] = []
        self.now = 1000.0
        self.directory = RunDir.at(str(tmp_path), "sweep")
        for number in (0, 1):
            self.directory.write_json({"num_steps": 40}, f"trial-000{number}", RUN)
        fake = SimpleNamespace(
            wait=lambda refs, timeout: (refs, []), get=lambda ref: ref, cluster_resources=lambda: {"CPU": 2.0}
        )
        monkeypatch.setattr(module, "ray", fake)
        self.board = self.make()

    def make(self) -> Board:
        view = SweepView(name="sweep", directory="", metric=METRIC, mode="min", num_trials=2, started=1000.0)
        broker = SimpleNamespace(claims=SimpleNamespace(remote=lambda: self.claims))
        viewer = SimpleNamespace(show=lambda view, now: self.shown.append(view))
        group = {"CPU": 1.0}, 4, 60.0
        facts: dict[str, Any] = {"format": 1}
        where: Any = (self.directory, FIFOScheduler(), broker, viewer)
        return Board(view, facts, *where, group, clock=lambda: self.now)

    def step(self, *trials: Any) -> SweepView:
        self.now += 1
        self.board.on_step_begin(0, list(trials))
        return self.shown[-1]

    def result(self, one: Any, step: int, value: float) -> None:
        self.board.on_trial_result(0, [one], one, {"step": step, METRIC: value})


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_trials_are_in_the_order_of_their_making_with_their_workers_and_steps(scene: Scene) -> None:
    first, second = trial(0, Trial.RUNNING), trial(1, Trial.PENDING)
    scene.claims = {"sweep/trial-0000": Claim("sweep/trial-0000", 1, 4, {"CPU": 1.0}, num_workers=3, step=17)}
    scene.step(second, first)
    view = scene.step(second, first)
    assert [(one.name, one.state, one.workers, one.step, one.num_steps) for one in view.trials] == [
        ("trial-0000", "running", 3, 17, 40),
        ("trial-0001", "pending", 0, 0, 0),
    ]


def test_a_trial_that_ended_is_completed_after_its_last_step_and_stopped_before_it(scene: Scene) -> None:
    first, second = trial(0, Trial.TERMINATED), trial(1, Trial.TERMINATED)
    scene.result(first, 40, 0.5)
    scene.result(second, 30, 0.5)
    assert [one.state for one in scene.step(first, second).trials] == ["completed", "stopped"]
    never = trial(2, Trial.TERMINATED)
    assert scene.step(never).trials[0].state == "stopped", "it has no steps, and not all of none"


def test_a_failed_trial_says_why(scene: Scene) -> None:
    failed = trial(0, Trial.ERROR, error=SimpleNamespace(cause="ValueError: Invalid learning rate"))
    view = scene.step(failed)
    assert (view.trials[0].state, view.trials[0].message) == ("failed", "ValueError: Invalid learning rate")


def test_a_curve_that_goes_on_from_an_earlier_step_forgets_what_came_after(scene: Scene) -> None:
    one = trial(0, Trial.RUNNING)
    for step, value in [(10, 0.9), (20, 0.8), (30, 0.7), (20, 0.6)]:
        scene.result(one, step, value)
    assert scene.step(one).trials[0].curve == ((10, 0.9), (20, 0.6))


def test_a_new_board_goes_on_with_what_the_old_one_knew(scene: Scene) -> None:
    one = trial(0, Trial.RUNNING)
    scene.result(one, 10, 0.9)
    state = scene.board.get_state()
    scene.board = scene.make()
    scene.board.set_state(state)
    assert scene.board.get_state() == state, "a snapshot before the first turn loses nothing"
    assert scene.step(one).trials[0].curve == ((10, 0.9),)


def test_a_trial_whose_clone_was_made_when_the_driver_died_has_no_length_yet(scene: Scene) -> None:
    """Between the clone and the run's start there is no run.json, and the curve is in Ray Tune's snapshot."""
    one = trial(0, Trial.PENDING)
    scene.result(one, 10, 0.9)
    Path(scene.directory.child("trial-0000", RUN)).unlink()
    view = scene.step(one)
    assert (view.trials[0].step, view.trials[0].num_steps) == (10, 0)


@pytest.mark.parametrize("value", [np.int64(3), nn.ReLU], ids=["numpy", "a class"])
def test_values_that_json_does_not_know_are_shown_and_written_all_the_same(scene: Scene, value: Any) -> None:
    one = trial(0, Trial.RUNNING)
    one.config = {"value": value}
    scene.step(one)
    found = json.loads(Path(scene.directory.child("sweep.json")).read_text())
    assert str(value) in str(found["view"]["trials"][0]["values"]["value"])


def test_results_without_the_metric_or_without_a_step_leave_the_curve_as_it_is(scene: Scene) -> None:
    one = trial(0, Trial.RUNNING)
    for result in ({"step": 10}, {METRIC: 0.5}, {"training_iteration": 1}):
        scene.board.on_trial_result(0, [one], one, result)
    assert scene.step(one).trials[0].curve == ()


def test_a_pause_and_an_error_without_a_cause_have_words(scene: Scene) -> None:
    paused, failed = trial(0, Trial.PAUSED), trial(1, Trial.ERROR)
    view = scene.step(paused, failed)
    assert [(one.state, one.message) for one in view.trials] == [("paused", ""), ("failed", "its process ended")]


def test_while_the_broker_is_away_nobody_is_said_to_have_workers(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.claims = {"sweep/trial-0000": Claim("sweep/trial-0000", 1, 4, {"CPU": 1.0}, num_workers=3, step=17)}
    one = trial(0, Trial.RUNNING)
    scene.step(one)
    assert scene.step(one).trials[0].workers == 3

    def away(reference: Any) -> Any:
        raise ActorDiedError

    monkeypatch.setattr(module.ray, "get", away)
    assert scene.step(one).trials[0].workers == 0


def test_it_looks_a_few_times_a_second_and_writes_less_often(scene: Scene) -> None:
    one = trial(0, Trial.RUNNING)
    scene.step(one)
    path = Path(scene.directory.child("sweep.json"))
    path.unlink()
    scene.board.on_step_begin(0, [one])
    assert len(scene.shown) == 1
    scene.now += LOOK_EVERY_S
    scene.board.on_step_begin(0, [one])
    assert (len(scene.shown), path.exists()) == (2, False)
    scene.now += WRITE_EVERY_S
    scene.board.on_step_begin(0, [one])
    assert path.exists()


def test_a_sweep_with_a_trial_that_has_not_ended_was_stopped(scene: Scene) -> None:
    scene.board.end([trial(0, Trial.TERMINATED), trial(1, Trial.PENDING)], 1001.0)
    assert scene.shown[-1].outcome == "stopped"


def test_the_file_holds_the_facts_and_the_trials(scene: Scene) -> None:
    scene.board.end([trial(0, Trial.TERMINATED)], 1001.0)
    found = json.loads(Path(scene.directory.child("sweep.json")).read_text())
    assert (found["format"], found["view"]["outcome"], len(found["view"]["trials"])) == (1, "completed", 1)


def test_a_sweep_that_was_stopped_keeps_what_was_known_before_ray_tune_ended_its_trials(scene: Scene) -> None:
    scene.step(trial(0, Trial.RUNNING))
    scene.board.end(None, 1002.0)
    assert (scene.shown[-1].outcome, scene.shown[-1].trials[0].state) == ("stopped", "running")


def test_r15_nobody_waits_for_ever_for_a_cluster_that_is_too_small(scene: Scene) -> None:
    waiting = trial(0, Trial.PENDING)
    scene.step(waiting)
    scene.now += 60
    with pytest.raises(ResourceError) as refused:
        scene.step(waiting)
    check("errors/tune_no_trial_starts.txt", f"{refused.value}\n")


def test_a_sweep_in_which_a_trial_has_run_may_wait(scene: Scene) -> None:
    scene.step(trial(0, Trial.RUNNING))
    scene.now += 600
    scene.step(trial(0, Trial.PENDING))


def test_names_are_numbers_with_leading_zeros() -> None:
    assert name_of(trial(7, Trial.PENDING)) == "trial-0007"
