"""What a heartbeat says, what the worker does on the reply, and how the leader learns of signals."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from raytrain.rendezvous.client import RendezvousClient
from raytrain.rendezvous.health import AT_RENDEZVOUS, READING, RESTORING, STARTING, WAITING, Heartbeat
from raytrain.rendezvous.state import NO_STATE, Generation, JoinRequest, Signals
from raytrain.worker import heartbeat as module
from raytrain.worker.heartbeat import REPORT_EACH_STEPS, HeartbeatSender, SignalWatcher


class HeartbeatLog(RendezvousClient):
    """Keeps the heartbeats; its answer is `is_broken`, or an error; `on_beat` happens while it answers."""

    def __init__(self) -> None:
        self.beats: list[Heartbeat] = []
        self.is_broken = False
        self.error: Exception | None = None
        self.on_beat: Callable[[], None] = lambda: None
        self.has_come = threading.Event()

    def heartbeat(self, heartbeat: Heartbeat) -> bool:
        self.beats.append(heartbeat)
        self.has_come.set()
        self.on_beat()
        if self.error:
            raise self.error
        return self.is_broken


class Scene:
    """A sender that beats only when it is told to."""

    def __init__(self) -> None:
        self.now, self.aborts = 100.0, 0
        self.rendezvous = HeartbeatLog()
        self.sender = HeartbeatSender(self.rendezvous, "w0", 3600.0, clock=lambda: self.now)
        assert self.rendezvous.has_come.wait(10), "it says at once that the worker lives"

    def abort(self) -> None:
        self.aborts += 1

    def says(self) -> Heartbeat:
        self.sender.send()
        return self.rendezvous.beats[-1]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def generation(step: int = 3, max_step: int = NO_STATE, number: int = 4) -> Generation:
    return Generation(number, (JoinRequest("w0", step, ("h", 1)),), "loss", max_step=max_step)


def test_a_heartbeat_has_the_activity_and_its_duration(scene: Scene) -> None:
    assert scene.rendezvous.beats == [Heartbeat("w0", NO_STATE, STARTING, 0.0, is_first=True)]
    scene.sender.begin_step(7)
    scene.sender.set_activity(READING)
    scene.now += 2.5
    assert scene.says() == Heartbeat("w0", 7, READING, 2.5, is_first=True)


def test_r6_an_activity_is_the_first_until_a_step_with_it_is_finished(scene: Scene) -> None:
    """Since only the first call may have to compile; a place that comes up later may, too."""
    scene.sender.set_activity("in loss")
    assert scene.says().is_first
    scene.sender.finish_step(1)
    assert not scene.says().is_first
    scene.sender.set_activity("in an evaluation")
    assert scene.says().is_first
    scene.sender.finish_step(2)
    scene.sender.set_activity("in loss")
    assert (scene.says().is_first, scene.says().step) == (False, 2)


def test_r6_the_first_call_with_tensors_of_other_shapes_may_compile_again(scene: Scene) -> None:
    scene.sender.set_activity("in loss", 17)
    scene.sender.finish_step(1)
    scene.sender.set_activity("in loss", 17)
    assert not scene.says().is_first
    scene.sender.set_activity("in loss", 18)
    assert scene.says().is_first
    with scene.sender.waiting():
        assert scene.says().activity == WAITING
    assert (scene.says().activity, scene.says().is_first) == ("in loss", True), "it goes on with what it did"
    scene.sender.finish_step(2)
    assert not scene.says().is_first


def test_r6_a_heartbeat_says_how_long_the_activity_took_in_the_latest_finished_step(scene: Scene) -> None:
    for seconds, is_finished in ((40.0, True), (4.0, True), (500.0, False)):
        scene.sender.set_activity(WAITING)
        scene.now += seconds
        scene.sender.set_activity("in the optimizer")
        if is_finished:
            scene.sender.finish_step(1)
        else:
            scene.sender.leave_generation()
    scene.sender.set_activity(WAITING)
    assert scene.says().usual_s == 4.0


def test_r6_progress_within_an_activity_restarts_its_time(scene: Scene) -> None:
    scene.sender.set_activity(RESTORING)
    for _ in range(3):
        scene.now += 400.0
        assert scene.says().since_s == 400.0
        scene.sender.note_progress()
    assert (scene.says().activity, scene.says().since_s) == (RESTORING, 0.0)


def test_at_the_rendezvous_it_still_tells_who_trained_and_aborts_nothing(scene: Scene) -> None:
    mine = generation()
    scene.sender.enter_generation(mine, scene.abort)
    assert scene.says().generation is mine
    scene.sender.leave_generation()
    scene.rendezvous.is_broken = True
    assert scene.says() == Heartbeat("w0", NO_STATE, AT_RENDEZVOUS, 0.0, True, mine)
    assert scene.aborts == 0


def test_r6_a_lost_peer_aborts_the_collective_of_its_own_generation_once(scene: Scene) -> None:
    def form_again() -> None:
        scene.sender.leave_generation()
        scene.sender.enter_generation(generation(number=5), scene.abort)

    scene.sender.enter_generation(generation(), lambda: pytest.fail("its reply comes too late"))
    scene.says()
    scene.rendezvous.is_broken, scene.rendezvous.on_beat = True, form_again
    scene.says()
    assert scene.aborts == 0, "the reply is about the last generation"
    scene.rendezvous.on_beat = lambda: None
    scene.says()
    scene.says()
    assert scene.aborts == 1


@pytest.mark.parametrize("error", [RayActorError(), GetTimeoutError("slow"), OSError("no route")])
def test_p1_a_rendezvous_that_is_down_does_not_stop_the_training_thread(scene: Scene, error: Exception) -> None:
    scene.sender.enter_generation(generation(step=3, max_step=5), scene.abort)
    scene.rendezvous.error = error
    scene.sender.begin_step(3)
    assert scene.rendezvous.beats[-1].step == 3
    assert scene.aborts == 0


@pytest.mark.parametrize(
    ("max_step", "step", "num_beats"),
    [(NO_STATE, 3, 0), (3, 3, 0), (5, 3, 1), (5, 4 + REPORT_EACH_STEPS, 1), (5, 5 + REPORT_EACH_STEPS, 0)],
)
def test_r16_steps_are_reported_at_once_if_all_workers_ahead_are_lost(
    scene: Scene, max_step: int, step: int, num_beats: int
) -> None:
    """So that the step in which a process dies is known, however short steps are."""
    scene.sender.enter_generation(generation(step=3, max_step=max_step), scene.abort)
    before = len(scene.rendezvous.beats)
    scene.sender.begin_step(step)
    assert len(scene.rendezvous.beats) == before + num_beats


def test_heartbeats_are_sent_until_the_sender_is_closed() -> None:
    rendezvous = HeartbeatLog()
    sender = HeartbeatSender(rendezvous, "w0", 0.001)
    thread = next(t for t in reversed(threading.enumerate()) if t.name == "heartbeat")
    for _ in range(3):
        rendezvous.has_come.clear()
        assert rendezvous.has_come.wait(10)
    sender.close()
    thread.join(10)
    assert not thread.is_alive()


class Watched(RendezvousClient):
    """Answers `watch` with what the test puts in; the test knows when the next question comes."""

    def __init__(self) -> None:
        self.answers: queue.Queue[Signals] = queue.Queue()
        self.questions: queue.Queue[int] = queue.Queue()

    def watch(self, generation: int) -> Signals:
        self.questions.put(generation)
        return self.answers.get(timeout=10)

    def hears(self, signals: Signals) -> None:
        """Returns when the watcher has taken the answer, and asks again."""
        self.answers.put(signals)
        assert self.questions.get(timeout=10) == 7


GROUP: Any = SimpleNamespace(is_leader=True, generation=Generation(7, (), "start"))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(module, "WATCH_PAUSE_S", 0.001)
    monkeypatch.setattr(module, "WATCH_PAUSE_AFTER_SIGNAL_S", 0.001)
    return Watched()


@pytest.fixture
def watcher(watched: Watched) -> Iterator[SignalWatcher]:
    """The watcher ends with its generation."""
    watching = SignalWatcher(watched, GROUP)
    thread = next(t for t in reversed(threading.enumerate()) if t.name == "signals")
    assert watched.questions.get(timeout=10) == 7
    yield watching
    watching.close()
    watched.answers.put(Signals())
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "heard",
    [
        pytest.param([Signals()] * 3 + [Signals(regroup=True)], id="it watches until there is a signal"),
        pytest.param([Signals(regroup=True), Signals(regroup=True, save=True), Signals(stop=True)], id="more may follow"),
        pytest.param([Signals(regroup=True), Signals()], id="it is withdrawn when its newcomer dies"),
    ],
)
def test_the_watcher_has_the_latest_signals(heard: list[Signals], watched: Watched, watcher: SignalWatcher) -> None:
    for signals in heard:
        watched.hears(signals)
        assert watcher.signals == signals
