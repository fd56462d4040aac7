"""What is due between two steps, and what a new leader owes after the old one."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from raytrain.config import RunConfig
from raytrain.errors import CheckpointError, ConfigError, StorageError, TaskError
from raytrain.events.kinds import EvaluationDone, StateDigest
from raytrain.rendezvous.health import SAVING, WAITING
from raytrain.rendezvous.state import Signals
from raytrain.worker import boundary as module
from raytrain.worker.boundary import StepBoundary, is_better, is_due
from raytrain.worker.evaluation import EvaluationInterrupted
from raytrain.worker.state import TrainState
from tests.unit.worker.stubs import context_of

QUIET, STOP = Signals(), Signals(stop=True)


@pytest.mark.parametrize(
    ("step", "every", "num_steps", "due"),
    [(0, 5, 20, False), (4, 5, 20, False), (5, 5, 20, True), (10, 5, 20, True), (18, 5, 18, True), (18, 5, 20, False)],
)
def test_things_are_due_every_n_steps_and_at_the_end(step: int, every: int, num_steps: int, due: bool) -> None:
    assert is_due(step, every, num_steps) == due


@pytest.mark.parametrize("best", ["min:valid/loss", "max:valid/loss"])
def test_r8_a_score_is_better_if_it_is_finite_and_beyond_the_best(best: str) -> None:
    sign = 1 if best.startswith("min") else -1
    for better, than in ((0.5, None), (0.5 * sign, 0.6 * sign)):
        assert is_better(better, than, best)
    for other, than in ((0.5, 0.5), (0.7 * sign, 0.6 * sign), (None, None), (math.nan, None), (-math.inf * sign, 0.5)):
        assert not is_better(other, than, best)


class Saver:
    """Saves at once; fails `num_failures` times."""

    def __init__(self, num_failures: int = 0) -> None:
        self.saved: list[tuple[int, dict[str, float]]] = []
        self.with_metrics: list[int] = []
        self.newest_step: int | None = None
        self.idle = True
        self.last_error: OSError | None = None
        self._left = num_failures

    def save(self, snapshot: int, metrics: dict[str, float], run: Any) -> None:
        self.newest_step = snapshot
        self.saved.append((snapshot, dict(metrics)))
        self._left -= 1
        self.last_error = OSError("disk full") if self._left >= 0 else None

    def set_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.with_metrics.append(step)
        self.saved = [(saved, dict(metrics) if saved == step else old) for saved, old in self.saved]

    @property
    def can_retry(self) -> bool:
        return self.last_error is not None

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.saved]


class Store:
    """Has checkpoints of `steps`, or an error."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.metrics = {"valid/loss": 0.5}
        self.error: StorageError | None = None

    def list(self) -> list[Any]:
        if self.error:
            raise self.error
        return [SimpleNamespace(step=step, manifest=SimpleNamespace(metrics=self.metrics)) for step in self.steps]


class State(TrainState):
    def snapshot(self) -> Any:
        return self.step


class Scene:
    """A run of 100 steps, evaluated every 5, with a checkpoint every 50.

    The loss at the evaluations is 0.9 at step 5, best at step 10 with 0.5, and worse again at 15, 50 and 100.
    """

    def __init__(self) -> None:
        self.store, self.events, self.saver = Store(), [], Saver()  # type: ignore[var-annotated]
        self.spec = SimpleNamespace(
            plan=SimpleNamespace(steps_per_epoch=20),
            num_steps=100,
            sources={"train": None, "valid": SimpleNamespace(num_rows=37)},
            eval_names=["valid"],
            manifest_facts={},
        )
        self.configure(digest="off")
        self.context = context_of(self.spec, self.store, SimpleNamespace(emit=self.events.append))
        self.num_evaluations = 0
        self.watcher = SimpleNamespace(signals=Signals())
        model = nn.Linear(1, 1)
        self.state: TrainState = State(model, torch.optim.SGD(model.parameters(), lr=0.1), None)

    def configure(self, **settings: Any) -> None:
        self.spec.config = RunConfig(eval_every=5, checkpoint_every=50, steps=100, **settings)

    def evaluate(self, context: Any, model: Any, group: Any, name: str, assigned: Any, pending: Any) -> dict[str, float]:
        self.num_evaluations += 1
        if pending().stop or pending().drain:
            raise EvaluationInterrupted(pending())
        return {"valid/loss": {5: 0.9, 10: 0.5, 15: 0.7, 50: 0.6, 100: 0.8}[self.state.step]}

    def boundary(self, is_leader: bool = True) -> StepBoundary:
        group: Any = SimpleNamespace(is_leader=is_leader, device=torch.device("cpu"), all_reduce=lambda vector: vector)
        return StepBoundary(self.context, group, range(1), self.saver, self.watcher)  # type: ignore[arg-type]

    def at(self, *steps: int, boundary: StepBoundary | None = None, agreed: Signals = QUIET) -> Signals:
        """Comes to the boundaries of these steps, in one generation."""
        boundary = boundary or self.boundary()
        for self.state.step in steps:
            agreed = boundary.run_due(self.state, agreed)
        return agreed

    @property
    def digested(self) -> list[int]:
        return [event.step for event in self.events if isinstance(event, StateDigest)]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene()
    monkeypatch.setattr(module, "evaluate", made.evaluate)
    return made


def test_r8_checkpoints_are_saved_when_due_and_when_the_score_is_the_best(scene: Scene) -> None:
    scene.at(0, 1, 5, 7, 10, 15, 50, 100)
    assert scene.saver.steps == [5, 10, 50, 100]
    assert scene.saver.with_metrics == [50, 100], "those that were saved before their evaluation"
    assert scene.saver.saved[2][1] == {"valid/loss": 0.6}
    evaluations = [(event.step, event.is_best) for event in scene.events if isinstance(event, EvaluationDone)]
    assert evaluations == [(5, True), (10, True), (15, False), (50, False), (100, False)]


def test_a_repeated_boundary_is_not_evaluated_or_saved_again(scene: Scene) -> None:
    scene.at(5)
    scene.at(5)
    assert (scene.num_evaluations, scene.saver.steps) == (1, [5])


@pytest.mark.parametrize(
    ("on_storage", "is_readable", "saved"),
    [
        pytest.param([], True, [5], id="r8: not saved by the old one"),
        pytest.param([5], True, [], id="saved by the old one"),
        pytest.param([5], False, [5], id="r7: the store cannot be read, and twice does no harm"),
    ],
)
def test_r8_r7_a_new_leader_saves_the_best_checkpoint_if_the_old_one_did_not(
    on_storage: list[int], is_readable: bool, saved: list[int], scene: Scene
) -> None:
    scene.at(5, boundary=scene.boundary(is_leader=False))
    assert scene.saver.saved == []
    scene.store.steps = on_storage
    if not is_readable:
        scene.store.error = StorageError("run/checkpoints", OSError(5, "I/O error"), "can be read", "check the storage")
    scene.at(5)
    assert scene.saver.saved == [(step, {"valid/loss": 0.9}) for step in saved]
    assert scene.saver.with_metrics == ([] if saved else [5]), "it may have been saved before the evaluation"
    assert scene.num_evaluations == 1


def test_r6_a_stop_makes_a_checkpoint_due_that_may_be_slow_and_others_wait(scene: Scene) -> None:
    boundary = scene.boundary()
    scene.at(7, boundary=boundary, agreed=STOP)
    boundary.wait_until_saved(scene.state)
    assert scene.saver.saved == [(7, {})]
    assert scene.context.heartbeat.activities == [SAVING, WAITING]  # type: ignore[attr-defined]


def test_r7_a_last_checkpoint_that_failed_is_retried_and_then_an_error(scene: Scene) -> None:
    scene.saver = Saver(num_failures=2)
    boundary = scene.boundary()
    scene.at(7, boundary=boundary, agreed=STOP)
    with pytest.raises(CheckpointError, match="of step 7, was not saved: disk full"):
        boundary.wait_until_saved(scene.state, retry_s=0.0)
    boundary.wait_until_saved(scene.state)
    assert scene.saver.steps == [7, 7, 7]


@pytest.mark.parametrize("pending", [STOP, Signals(regroup=True, save=True, drain=True), Signals(regroup=True, drain=True)])
def test_r16_an_interrupted_evaluation_is_repeated_later(pending: Signals, scene: Scene) -> None:
    scene.watcher.signals = pending
    assert scene.at(5) == Signals(regroup=pending.regroup, save=pending.save, stop=pending.stop)
    assert scene.saver.saved == ([(5, {})] if pending.stop or pending.save else [])
    assert scene.state.evaluation.step != 5

    scene.store.steps, scene.store.metrics = scene.saver.steps, {}
    scene.watcher.signals, scene.saver = Signals(), Saver()
    assert scene.at(5) == Signals()
    if scene.store.steps:
        assert (scene.saver.steps, scene.saver.with_metrics) == ([], [5]), "now its metrics are known"
    else:
        assert scene.saver.saved == [(5, {"valid/loss": 0.9})], "it is the best one"


class FailsToEvaluate(Scene):
    """Its evaluations raise, as after a mistake in `metrics`; they note what was submitted to the saver by then."""

    def evaluate(self, *_: Any) -> dict[str, float]:
        self.saved_before = self.saver.steps
        raise TaskError("KeyError: 'label'", "metrics in evaluation")


def test_r7_a_checkpoint_is_saved_before_an_evaluation_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = FailsToEvaluate()
    monkeypatch.setattr(module, "evaluate", scene.evaluate)
    with pytest.raises(TaskError, match="label"):
        scene.at(50)
    assert scene.saved_before == [50]
    assert scene.context.heartbeat.activities[-1] == WAITING  # type: ignore[attr-defined]
    scene.saver = Saver(num_failures=1)
    with pytest.raises(TaskError, match="label"):
        scene.at(50)
    assert scene.saver.last_error, "a checkpoint that failed does not hide the error"


class Odd(torch.optim.SGD):
    """Has a state that cannot be saved, from its first step on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state[self.param_groups[0]["params"][0]]["helper"] = object()


def test_r9_what_cannot_be_saved_after_the_first_step_is_named_at_once(scene: Scene) -> None:
    scene.spec.task = None
    scene.state.optimizer = Odd(scene.state.model.parameters(), lr=0.1)
    boundary = scene.boundary()
    scene.at(0, boundary=boundary)
    scene.state.optimizer.step()
    with pytest.raises(ConfigError, match=r"optimizer.state\.0\.helper is a builtins.object"):
        scene.at(1, boundary=boundary)


@pytest.mark.parametrize(("step", "pending"), [(5, Signals(regroup=True)), (100, STOP)])
def test_r16_newcomers_and_a_stop_at_the_last_step_do_not_interrupt(step: int, pending: Signals, scene: Scene) -> None:
    scene.watcher.signals = pending
    assert scene.at(step) == Signals()
    assert scene.state.evaluation.step == step


def test_digests_are_emitted_every_n_steps_and_at_the_end_once_per_generation(scene: Scene) -> None:
    scene.configure(digest="every:3")
    scene.at(0, 1, 3, 3, 5, 6, 99, 100)
    assert scene.digested == [3, 6, 99, 100]
    assert scene.context.heartbeat.activities[0] == SAVING  # type: ignore[attr-defined]
    scene.at(3)
    scene.at(3, boundary=scene.boundary(is_leader=False))
    assert scene.digested == [3, 6, 99, 100, 3], "a new generation emits that of its first step again"


def test_digests_are_emitted_with_the_checkpoints_that_are_saved(scene: Scene) -> None:
    scene.configure(digest="checkpoints")
    scene.store.steps = [5]
    boundary = scene.boundary()
    scene.at(0, 5, 10, 15, 50, 50, boundary=boundary)
    scene.at(57, boundary=boundary, agreed=STOP)
    assert scene.digested == scene.saver.steps == [10, 50, 57]


@pytest.mark.parametrize(("exactness", "digested"), [("default", []), ("bitwise", [50])])
def test_bitwise_mode_has_digests_by_default(exactness: str, digested: list[int], scene: Scene) -> None:
    scene.configure(exactness=exactness)
    scene.at(50)
    assert scene.digested == digested
