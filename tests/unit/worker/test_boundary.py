"""What is due between two steps, and what a new leader owes after the old one."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from raytrain.config import RunConfig
from raytrain.errors import CheckpointError, StorageError
from raytrain.events.kinds import EvaluationDone, StateDigest
from raytrain.rendezvous.generation import Signals
from raytrain.rendezvous.vitals import SAVING, WAITING
from raytrain.worker import boundary as module
from raytrain.worker.boundary import BoundaryDuties, is_better, is_due
from raytrain.worker.evaluation import BrokenOff
from raytrain.worker.state import TrainState
from tests.unit.worker.marks import Marks

STOP = Signals(stop=True)


@pytest.mark.parametrize(
    ("step", "every", "num_steps", "due"),
    [(0, 5, 20, False), (4, 5, 20, False), (5, 5, 20, True), (10, 5, 20, True), (18, 5, 18, True), (18, 5, 20, False)],
)
def test_things_are_due_every_so_many_steps_and_at_the_end(step: int, every: int, num_steps: int, due: bool) -> None:
    assert is_due(step, every, num_steps) == due


@pytest.mark.parametrize(
    ("score", "than", "best", "better"),
    [
        (0.5, None, "min:valid/loss", True),
        (0.5, 0.6, "min:valid/loss", True),
        (0.5, 0.5, "min:valid/loss", False),
        (0.7, 0.6, "min:valid/loss", False),
        (0.7, 0.6, "max:valid/accuracy", True),
        (0.5, 0.6, "max:valid/accuracy", False),
        (None, None, "min:valid/loss", False),
        (math.nan, None, "min:valid/loss", False),
        (math.inf, None, "max:valid/loss", False),
        (-math.inf, 0.5, "min:valid/loss", False),
    ],
)
def test_r8_a_score_is_better_if_it_is_finite_and_beyond_the_best(
    score: float | None, than: float | None, best: str, better: bool
) -> None:
    assert is_better(score, than, best) == better


class Saver:
    def __init__(self) -> None:
        self.saved: list[tuple[int, dict[str, float]]] = []
        self.newest_step: int | None = None
        self.idle, self.last_error = True, None

    def save(self, snapshot: int, metrics: dict[str, float], run: Any) -> None:
        self.newest_step = snapshot
        self.saved.append((snapshot, dict(metrics)))


class Store:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.metrics = {"valid/loss": 0.5}

    def list(self) -> list[Any]:
        return [SimpleNamespace(step=step, manifest=SimpleNamespace(metrics=self.metrics)) for step in self.steps]


class State(TrainState):
    def snapshot(self) -> Any:
        return self.step


class Scene:
    """A run of 100 steps, evaluated every 5, with a checkpoint every 50; `scores` has the loss at each evaluation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scores: dict[int, float], digest: str = "off") -> None:
        self.store, self.told, self.pulse = Store(), [], Marks()  # type: ignore[var-annotated]
        self.around: Any = SimpleNamespace(
            config=RunConfig(eval_every=5, checkpoint_every=50, steps=100, digest=digest),
            plan=SimpleNamespace(steps_per_epoch=20),
            num_steps=100,
            sources={"train": None, "valid": SimpleNamespace(num_rows=37)},
            telemetry=SimpleNamespace(emit=self.told.append),
            store=self.store,
            pulse=self.pulse,
            run_facts={},
        )
        self.num_evaluations = 0

        self.heard = Signals()

        def evaluate(around: Any, model: Any, group: Any, name: str, held: Any, heard: Any) -> dict[str, float]:
            self.num_evaluations += 1
            if heard().stop or heard().leave:
                raise BrokenOff(heard())
            return {"valid/loss": scores[self.state.step]}

        monkeypatch.setattr(module, "evaluate", evaluate)
        model = nn.Linear(1, 1)
        self.state: TrainState = State(model, torch.optim.SGD(model.parameters(), lr=0.1), None)

    def duties(self, saver: Saver, leads: bool = True) -> BoundaryDuties:
        group: Any = SimpleNamespace(leads=leads, device=torch.device("cpu"), sum=lambda vector: vector)
        return BoundaryDuties(self.around, group, range(1), saver, lambda: self.heard)  # type: ignore[arg-type]

    @property
    def digested(self) -> list[int]:
        return [event.step for event in self.told if isinstance(event, StateDigest)]

    def at(self, step: int, duties: BoundaryDuties, **more: Any) -> Signals:
        self.state.step = step
        return duties.at_boundary(self.state, **more)


def test_r8_checkpoints_are_saved_when_due_and_when_the_score_is_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {5: 0.9, 10: 0.5, 15: 0.7, 50: 0.6, 100: 0.8}
    scene, saver = Scene(monkeypatch, scores), Saver()
    duties = scene.duties(saver)
    for step in (0, 1, 5, 7, 10, 15, 50, 100):
        scene.at(step, duties)
    assert [step for step, _ in saver.saved] == [5, 10, 50, 100]
    assert saver.saved[2][1] == {"valid/loss": 0.6}
    assert [(e.step, e.is_best) for e in scene.told if isinstance(e, EvaluationDone)] == [
        (5, True),
        (10, True),
        (15, False),
        (50, False),
        (100, False),
    ]


def test_a_boundary_that_is_passed_again_is_not_evaluated_or_saved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, saver = Scene(monkeypatch, {5: 0.9}), Saver()
    scene.at(5, scene.duties(saver))
    scene.at(5, scene.duties(saver))
    assert (scene.num_evaluations, len(saver.saved)) == (1, 1)


def test_r8_a_best_checkpoint_that_the_old_leader_did_not_live_to_save_is_saved_by_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, mine = Scene(monkeypatch, {5: 0.9}), Saver()
    scene.at(5, scene.duties(mine, leads=False))
    assert mine.saved == []
    scene.at(5, scene.duties(mine, leads=True))
    assert mine.saved == [(5, {"valid/loss": 0.9})]
    assert scene.num_evaluations == 1


def test_a_checkpoint_that_the_old_leader_has_saved_is_not_saved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, mine = Scene(monkeypatch, {5: 0.9}), Saver()
    scene.at(5, scene.duties(mine, leads=False))
    scene.store.steps = [5]
    scene.at(5, scene.duties(mine, leads=True))
    assert mine.saved == []


def test_r7_a_new_leader_that_cannot_read_the_store_trains_on_and_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, mine = Scene(monkeypatch, {5: 0.9}), Saver()

    def broken() -> list[Any]:
        raise StorageError("run/checkpoints", OSError(5, "Input/output error"), "can be read", "check the storage")

    monkeypatch.setattr(scene.store, "list", broken)
    scene.at(5, scene.duties(mine))
    assert mine.saved == [(5, {"valid/loss": 0.9})], "twice does no harm"


def test_a_stop_makes_a_checkpoint_due(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, saver = Scene(monkeypatch, {}), Saver()
    scene.at(7, scene.duties(saver), told=STOP)
    assert saver.saved == [(7, {})]


def test_a_last_checkpoint_that_failed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, saver = Scene(monkeypatch, {}), Saver()
    scene.duties(saver).finish(scene.state)
    saver.last_error = OSError("disk full")  # type: ignore[assignment]
    scene.state.step = 100
    with pytest.raises(CheckpointError, match="of step 100, was not saved: disk full"):
        scene.duties(saver).finish(scene.state, patience_s=0.0)


def test_r7_a_last_checkpoint_that_failed_is_saved_once_the_storage_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Back(Saver):
        """Of a storage that is back for the third attempt."""

        def save(self, snapshot: int, metrics: dict[str, float], run: Any) -> None:
            super().save(snapshot, metrics, run)
            self.last_error = OSError("read-only") if len(self.saved) < 3 else None  # type: ignore[assignment]

    scene, saver = Scene(monkeypatch, {}), Back()
    duties = scene.duties(saver)
    scene.at(7, duties, told=STOP)
    duties.finish(scene.state)
    assert [step for step, _ in saver.saved] == [7, 7, 7]


@pytest.mark.parametrize("heard", [STOP, Signals(gather=True, save=True, leave=True), Signals(gather=True, leave=True)])
def test_r16_an_evaluation_is_broken_off_where_time_is_short_and_done_anew_later(
    monkeypatch: pytest.MonkeyPatch, heard: Signals
) -> None:
    scene, saver = Scene(monkeypatch, {5: 0.9}), Saver()
    scene.heard = heard
    told = scene.at(5, scene.duties(saver))
    assert told == Signals(gather=heard.gather, save=heard.save, stop=heard.stop)
    assert saver.saved == ([(5, {})] if heard.stop or heard.save else [])
    assert scene.state.boundary.evaluated != 5

    scene.heard, again = Signals(), Saver()
    scene.store.steps, scene.store.metrics = [step for step, _ in saver.saved], {}
    assert scene.at(5, scene.duties(again)) == Signals()
    assert again.saved == [(5, {"valid/loss": 0.9})], "it is the best one, and now its metrics are known"


def test_r16_newcomers_and_a_stop_at_the_very_end_wait_for_the_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {5: 0.9, 100: 0.8})
    for step, scene.heard in ((5, Signals(gather=True)), (100, STOP)):
        assert scene.at(step, scene.duties(Saver())) == Signals()
        assert scene.state.boundary.evaluated == step


def test_r6_saving_may_be_slow_and_the_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, saver = Scene(monkeypatch, {}), Saver()
    duties = scene.duties(saver)
    scene.at(7, duties, told=STOP)
    duties.finish(scene.state)
    assert scene.pulse.places == [SAVING, WAITING]


def test_digests_are_told_every_so_many_steps_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {5: 0.9, 100: 0.8}, "every:3")
    duties = scene.duties(Saver())
    for step in (0, 1, 3, 3, 5, 6, 99, 100):
        scene.at(step, duties)
    assert scene.digested == [3, 6, 99, 100]
    assert scene.pulse.places[0] == SAVING


def test_a_new_generation_tells_the_digest_of_its_first_step_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {}, "every:3")
    scene.at(3, scene.duties(Saver()))
    scene.at(3, scene.duties(Saver()))
    scene.at(3, scene.duties(Saver(), leads=False))
    assert scene.digested == [3, 3]


def test_digests_go_with_the_checkpoints_that_are_really_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, saver = Scene(monkeypatch, {5: 0.9, 10: 0.5, 15: 0.7, 50: 0.6}, "checkpoints"), Saver()
    scene.store.steps = [5]
    duties = scene.duties(saver)
    for step in (0, 5, 10, 15, 50, 50):
        scene.at(step, duties)
    scene.at(57, duties, told=STOP)
    assert scene.digested == [step for step, _ in saver.saved] == [10, 50, 57]


def test_without_the_setting_there_are_no_digests_but_with_bitwise_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {50: 0.5}, "")
    scene.at(50, scene.duties(Saver()))
    assert scene.digested == []
    scene.around.config = RunConfig(eval_every=5, checkpoint_every=50, steps=100, exactness="bitwise")
    scene.at(50, scene.duties(Saver()))
    assert scene.digested == [50]
