"""A worker from its slot to its training function: nothing blocks, and its start has a timeout."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from raytrain.elastic import worker as module
from raytrain.elastic.worker import ElasticWorker, StartFailed

TIMEOUT_S = 600.0


class FakeSlot:
    """A slot that is placed when the scene has room."""

    is_reserved, strategy = False, None

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    @property
    def is_placed(self) -> bool:
        return self._scene.has_room

    def release(self) -> None:
        self._scene.num_released += 1


class Scene:
    """A worker whose slot, actor and clock are the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_room, self.now, self.num_done, self.num_released = True, 100.0, 0, 0
        self.error: Exception | None = None
        self.killed: list[Any] = []
        call = SimpleNamespace(remote=lambda *given, **named: "started")
        self.actor = SimpleNamespace(get_metadata=call, init_train_context=call, run_train_fn=call)
        made = SimpleNamespace(options=lambda scheduling_strategy, runtime_env: SimpleNamespace(remote=lambda: self.actor))
        fake = {"remote": lambda **given: lambda cls: made, "wait": self._wait, "get": self._get, "kill": self.killed.append}
        monkeypatch.setattr(module, "ray", SimpleNamespace(**fake))
        slot: Any = FakeSlot(self)
        self.worker = ElasticWorker(3, {"CPU": 1.0}, {}, slot, TIMEOUT_S, clock=lambda: self.now)

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


def test_a_process_starts_when_there_is_room_and_is_ready_when_its_function_runs(scene: Scene) -> None:
    scene.has_room = False
    assert (scene.worker.name, scene.worker.is_extra) == ("w3", True)
    assert not scene.worker.try_place()
    assert scene.worker.poll() is None
    scene.has_room = True
    assert scene.worker.try_place()
    assert scene.worker.is_placed
    assert not scene.worker.try_place(), "once"
    scene.worker.launch({}, None)
    scene.num_done = 2
    assert scene.worker.poll() is None
    scene.num_done = 3
    worker = scene.worker.poll()
    assert worker is not None
    assert (worker.actor, worker.metadata, worker.resources) == (scene.actor, "metadata", {"CPU": 1.0})


def test_r6_a_process_that_does_not_start_in_time_fails(scene: Scene) -> None:
    scene.has_room = False
    scene.worker.try_place()
    scene.now += 10 * TIMEOUT_S
    assert scene.worker.poll() is None, "the time without room does not count"
    scene.has_room = True
    scene.worker.try_place()
    scene.worker.launch({}, None)
    scene.now += TIMEOUT_S
    assert scene.worker.poll() is None
    scene.now += 1
    with pytest.raises(StartFailed, match="did not start within 600 s") as caught:
        scene.worker.poll()
    assert not caught.value.preempted


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_death_before_the_start_says_whether_it_was_a_preemption(scene: Scene, is_preempted: bool) -> None:
    error = ActorDiedError()
    error._preempted = is_preempted
    scene.error, scene.num_done = error, 3
    scene.worker.try_place()
    scene.worker.launch({}, None)
    with pytest.raises(StartFailed) as caught:
        scene.worker.poll()
    assert pickle.loads(pickle.dumps(caught.value)).preempted is is_preempted


@pytest.mark.parametrize("is_placed", [False, True])
def test_process_and_slot_are_released(scene: Scene, is_placed: bool) -> None:
    scene.has_room = is_placed
    scene.worker.try_place()
    scene.worker.release()
    assert (scene.killed, scene.num_released) == ([scene.actor] if is_placed else [], 1)
