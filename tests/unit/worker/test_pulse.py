"""What a heartbeat says, and what the worker does when the answer is that a peer is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from raytrain.rendezvous.generation import NO_STATE, Entrant, Generation, Signals
from raytrain.rendezvous.vitals import AT_DOOR, READING, STARTING, Beat
from raytrain.worker.pulse import CAREFUL_STEPS, Pulse


class Rendezvous:
    """Keeps the heartbeats; its answer is `is_broken`, or an error; `on_beat` happens while it answers."""

    def __init__(self) -> None:
        self.beats: list[Beat] = []
        self.is_broken = False
        self.error: Exception | None = None
        self.on_beat: Callable[[], None] = lambda: None
        self.has_come = threading.Event()

    def beat(self, beat: Beat) -> bool:
        self.beats.append(beat)
        self.has_come.set()
        self.on_beat()
        if self.error:
            raise self.error
        return self.is_broken

    def enter(self, entrant: Entrant) -> Generation | None:
        raise NotImplementedError

    def watch(self, generation: int) -> Signals:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Scene:
    """A pulse that beats only when it is told to."""

    def __init__(self) -> None:
        self.now, self.aborts = 100.0, 0
        self.rendezvous = Rendezvous()
        self.pulse = Pulse(self.rendezvous, "w0", 3600.0, clock=lambda: self.now)
        assert self.rendezvous.has_come.wait(10), "it says at once that the worker lives"

    def abort(self) -> None:
        self.aborts += 1

    def says(self) -> Beat:
        self.pulse.beat()
        return self.rendezvous.beats[-1]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def generation(step: int = 3, reached: int = NO_STATE, number: int = 4) -> Generation:
    return Generation(number, (Entrant("w0", step, ("h", 1)),), "loss", reached=reached)


def test_the_first_heartbeat_says_that_it_starts(scene: Scene) -> None:
    assert scene.rendezvous.beats == [Beat("w0", NO_STATE, STARTING, 0.0, is_first=True)]


def test_it_says_where_the_training_thread_is_and_since_when(scene: Scene) -> None:
    scene.pulse.begin_step(7)
    scene.pulse.mark(READING)
    scene.now += 2.5
    assert scene.says() == Beat("w0", 7, READING, 2.5, is_first=True)


def test_r6_a_place_is_the_first_of_its_kind_until_a_step_with_it_is_finished(scene: Scene) -> None:
    """Since only the first call may have to compile; a place that comes up later may, too."""
    scene.pulse.mark("in loss")
    assert scene.says().is_first
    scene.pulse.finish_step(1)
    assert not scene.says().is_first
    scene.pulse.mark("in an evaluation")
    assert scene.says().is_first
    scene.pulse.finish_step(2)
    scene.pulse.mark("in loss")
    assert not scene.says().is_first
    assert scene.says().step == 2


def test_it_tells_of_its_generation(scene: Scene) -> None:
    mine = generation()
    scene.pulse.join(mine, scene.abort)
    assert scene.says().generation is mine
    scene.pulse.part()
    assert scene.says() == Beat("w0", NO_STATE, AT_DOOR, 0.0, True, mine), "at the door it still tells who trained"


def test_r6_a_peer_that_is_gone_breaks_the_collective_once(scene: Scene) -> None:
    scene.pulse.join(generation(), scene.abort)
    scene.says()
    assert scene.aborts == 0
    scene.rendezvous.is_broken = True
    scene.says()
    scene.says()
    assert scene.aborts == 1


def test_there_is_nothing_to_break_at_the_door(scene: Scene) -> None:
    scene.pulse.join(generation(), scene.abort)
    scene.pulse.part()
    scene.rendezvous.is_broken = True
    scene.says()
    assert scene.aborts == 0


def test_an_answer_about_the_last_generation_does_not_break_the_next_one(scene: Scene) -> None:
    def form_again() -> None:
        scene.pulse.part()
        scene.pulse.join(generation(number=5), scene.abort)

    scene.pulse.join(generation(), lambda: None)
    scene.rendezvous.is_broken, scene.rendezvous.on_beat = True, form_again
    scene.says()
    assert scene.aborts == 0


@pytest.mark.parametrize("error", [RayActorError(), GetTimeoutError("slow"), OSError("no route")])
def test_p1_a_rendezvous_that_is_away_does_not_stop_the_training_thread(scene: Scene, error: Exception) -> None:
    scene.pulse.join(generation(step=3, reached=5), scene.abort)
    scene.rendezvous.error = error
    scene.pulse.begin_step(3)
    assert scene.rendezvous.beats[-1].step == 3
    assert scene.aborts == 0


@pytest.mark.parametrize(
    ("reached", "step", "is_told"),
    [(NO_STATE, 3, False), (3, 3, False), (5, 3, True), (5, 5 + CAREFUL_STEPS - 1, True), (5, 5 + CAREFUL_STEPS, False)],
)
def test_r16_where_all_who_were_further_have_died_the_begin_of_each_step_is_told_at_once(
    scene: Scene, reached: int, step: int, is_told: bool
) -> None:
    """So that the step in which a process dies is known, however short steps are."""
    scene.pulse.join(generation(step=3, reached=reached), scene.abort)
    before = len(scene.rendezvous.beats)
    scene.pulse.begin_step(step)
    assert len(scene.rendezvous.beats) == before + is_told


def test_it_beats_by_itself_until_it_is_closed() -> None:
    rendezvous = Rendezvous()
    pulse = Pulse(rendezvous, "w0", 0.001)
    thread = next(t for t in reversed(threading.enumerate()) if t.name == "pulse")
    for _ in range(3):
        rendezvous.has_come.clear()
        assert rendezvous.has_come.wait(10)
    pulse.close()
    thread.join(10)
    assert not thread.is_alive()
