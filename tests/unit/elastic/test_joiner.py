"""A worker on its way: nothing is waited for, its resources are its own, and its start has a limit."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from raytrain.elastic import joiner as module
from raytrain.elastic.joiner import Joiner, JoinFailed

LIMIT_S = 600.0


class Scene:
    """A joiner whose placement group, actor and clock are the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_room, self.now, self.num_done = True, 100.0, 0
        self.error: Exception | None = None
        self.killed: list[Any] = []
        self.removed: list[Any] = []
        self.place = SimpleNamespace()
        self.asked_for: list[Any] = []
        methods = {
            name: SimpleNamespace(remote=self._call) for name in ("get_metadata", "init_train_context", "run_train_fn")
        }
        self.actor = SimpleNamespace(**methods)
        made = SimpleNamespace(options=lambda scheduling_strategy: SimpleNamespace(remote=lambda: self.actor))
        fake = SimpleNamespace(
            remote=lambda **arguments: lambda cls: made, wait=self._wait, get=self._get, kill=self.killed.append
        )
        monkeypatch.setattr(module, "ray", fake)
        monkeypatch.setattr(module, "placement_group", self._placement_group)
        monkeypatch.setattr(module, "placement_group_table", self._table)
        monkeypatch.setattr(module, "remove_placement_group", self.removed.append)
        monkeypatch.setattr(module, "PlacementGroupSchedulingStrategy", lambda place, placement_group_bundle_index: None)
        self.joiner = Joiner(3, {"CPU": 1.0}, LIMIT_S, clock=lambda: self.now)

    def _placement_group(self, bundles: Any) -> Any:
        self.asked_for.append(bundles)
        return self.place

    def _table(self, place: Any) -> dict[str, str]:
        assert place is self.place
        return {"state": "CREATED" if self.has_room else "PENDING"}

    def _call(self, *arguments: Any, **named: Any) -> str:
        return "started"

    def _wait(self, calls: list[Any], num_returns: int, timeout: float) -> Any:
        assert timeout == 0
        return calls[: self.num_done], calls[self.num_done :]

    def _get(self, calls: list[Any]) -> Any:
        if self.error:
            raise self.error
        return ["metadata", None, None]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_resources_are_asked_for_at_once_and_a_process_starts_when_they_are_there(scene: Scene) -> None:
    scene.has_room = False
    joiner = scene.joiner
    assert (joiner.name, scene.asked_for) == ("w3", [[{"CPU": 1.0}]])
    assert not joiner.place()
    assert joiner.poll() is None
    scene.has_room = True
    assert joiner.place()
    assert joiner.is_placed
    assert not joiner.place(), "once"


def test_it_is_a_worker_when_its_training_function_runs(scene: Scene) -> None:
    scene.joiner.place()
    scene.joiner.launch({}, None)
    scene.num_done = 2
    assert scene.joiner.poll() is None
    scene.num_done = 3
    worker = scene.joiner.poll()
    assert worker is not None
    assert (worker.actor, worker.metadata, worker.resources) == (scene.actor, "metadata", {"CPU": 1.0})


def test_r6_a_process_that_does_not_start_in_time_has_failed(scene: Scene) -> None:
    scene.has_room = False
    scene.joiner.place()
    scene.now += 10 * LIMIT_S
    assert scene.joiner.poll() is None, "the time without room does not count"
    scene.has_room = True
    scene.joiner.place()
    scene.joiner.launch({}, None)
    scene.now += LIMIT_S
    assert scene.joiner.poll() is None
    scene.now += 1
    with pytest.raises(JoinFailed, match="did not start within 600 s") as caught:
        scene.joiner.poll()
    assert not caught.value.preempted


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_death_on_the_way_says_whether_the_cloud_took_its_node(scene: Scene, is_preempted: bool) -> None:
    error = ActorDiedError()
    error._preempted = is_preempted
    scene.error, scene.num_done = error, 3
    scene.joiner.place()
    scene.joiner.launch({}, None)
    with pytest.raises(JoinFailed) as caught:
        scene.joiner.poll()
    assert caught.value.preempted is is_preempted


@pytest.mark.parametrize("is_placed", [False, True])
def test_everything_is_given_back(scene: Scene, is_placed: bool) -> None:
    if is_placed:
        scene.joiner.place()
    scene.joiner.let_go()
    assert (scene.killed, scene.removed) == ([scene.actor] if is_placed else [], [scene.place])


def test_a_failed_join_says_why_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(JoinFailed("the actor died", preempted=True)))
    assert (str(error), error.preempted) == ("the actor died", True)
