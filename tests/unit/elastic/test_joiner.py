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


class Room:
    """A place that is there when the scene has room."""

    is_reserved, strategy = False, None

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    @property
    def is_there(self) -> bool:
        return self._scene.has_room

    def give_back(self) -> None:
        self._scene.num_returned += 1


class Scene:
    """A joiner whose place, actor and clock are the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_room, self.now, self.num_done = True, 100.0, 0
        self.error: Exception | None = None
        self.killed: list[Any] = []
        self.num_returned = 0
        methods = {
            name: SimpleNamespace(remote=self._call) for name in ("get_metadata", "init_train_context", "run_train_fn")
        }
        self.actor = SimpleNamespace(**methods)
        made = SimpleNamespace(options=lambda scheduling_strategy: SimpleNamespace(remote=lambda: self.actor))
        fake = SimpleNamespace(
            remote=lambda **arguments: lambda cls: made, wait=self._wait, get=self._get, kill=self.killed.append
        )
        monkeypatch.setattr(module, "ray", fake)
        room: Any = Room(self)
        self.joiner = Joiner(3, {"CPU": 1.0}, room, LIMIT_S, clock=lambda: self.now)

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


def test_a_process_starts_when_there_is_room(scene: Scene) -> None:
    scene.has_room = False
    joiner = scene.joiner
    assert (joiner.name, joiner.is_extra) == ("w3", True)
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
    assert (scene.killed, scene.num_returned) == ([scene.actor] if is_placed else [], 1)


def test_a_failed_join_says_why_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(JoinFailed("the actor died", preempted=True)))
    assert (str(error), error.preempted) == ("the actor died", True)
