"""The leader hears of newcomers, drains and a stop in a thread of its own, for as long as its generation lasts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from raytrain.rendezvous.generation import Entrant, Generation, Signals
from raytrain.rendezvous.vitals import Beat
from raytrain.worker import bell as module
from raytrain.worker.bell import Bell


class Watched:
    """Answers `watch` with what the test puts in; the test knows when the next question comes."""

    def __init__(self) -> None:
        self.answers: queue.Queue[Signals] = queue.Queue()
        self.questions: queue.Queue[int] = queue.Queue()

    def watch(self, generation: int) -> Signals:
        self.questions.put(generation)
        return self.answers.get(timeout=10)

    def hears(self, signals: Signals) -> None:
        """Returns when the bell has taken the answer, and asks again."""
        self.answers.put(signals)
        assert self.questions.get(timeout=10) == 7

    def enter(self, entrant: Entrant) -> Generation | None:
        raise NotImplementedError

    def beat(self, beat: Beat) -> bool:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(module, "PAUSE_S", 0.001)
    monkeypatch.setattr(module, "PAUSE_AFTER_SIGNAL_S", 0.001)
    return Watched()


@pytest.fixture
def bell(watched: Watched) -> Iterator[Bell]:
    ringing = Bell(watched, 7)
    assert watched.questions.get(timeout=10) == 7
    yield ringing
    ringing.close()
    watched.answers.put(Signals())


def thread_of(bell: Bell) -> threading.Thread:
    return next(t for t in reversed(threading.enumerate()) if t.name == "bell")


def test_it_keeps_watching_until_it_hears_something(watched: Watched, bell: Bell) -> None:
    for _ in range(3):
        watched.hears(Signals())
        assert bell.signals == Signals()
    watched.hears(Signals(gather=True))
    assert bell.signals == Signals(gather=True)


def test_after_a_first_signal_it_hears_of_more(watched: Watched, bell: Bell) -> None:
    watched.hears(Signals(gather=True))
    watched.hears(Signals(gather=True, save=True))
    assert bell.signals == Signals(gather=True, save=True)
    watched.hears(Signals(stop=True))
    assert bell.signals == Signals(stop=True)


def test_a_newcomer_that_dies_at_the_door_calls_nobody_any_more(watched: Watched, bell: Bell) -> None:
    watched.hears(Signals(gather=True))
    watched.hears(Signals())
    assert bell.signals == Signals()


def test_it_stops_watching_when_its_generation_is_over(watched: Watched) -> None:
    bell = Bell(watched, 7)
    thread = thread_of(bell)
    bell.close()
    watched.answers.put(Signals())
    thread.join(10)
    assert not thread.is_alive()
    assert bell.signals == Signals()
