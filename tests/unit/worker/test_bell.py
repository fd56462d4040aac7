"""The leader hears of newcomers and of a stop in a thread of its own."""

from __future__ import annotations

import queue
import threading

from raytrain.rendezvous.state import Entrant, Generation
from raytrain.worker.bell import Bell
from raytrain.worker.step import Signals


class Watched:
    """Answers `watch` with what the test puts in, or with nothing new."""

    def __init__(self) -> None:
        self.answers: queue.Queue[tuple[bool, bool]] = queue.Queue()
        self.asked: list[int] = []

    def watch(self, generation: int) -> tuple[bool, bool]:
        self.asked.append(generation)
        return self.answers.get(timeout=10)

    def enter(self, entrant: Entrant) -> Generation | None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def thread_of(bell: Bell) -> threading.Thread:
    return next(t for t in reversed(threading.enumerate()) if t.name == "bell")


def test_it_keeps_watching_until_it_hears_something() -> None:
    watched = Watched()
    for answer in ((False, False), (False, False), (True, False)):
        watched.answers.put(answer)
    bell = Bell(watched, 7)
    for thread in [t for t in threading.enumerate() if t.name == "bell"]:
        thread.join(10)
    assert bell.signals == Signals(newcomers=True, stop=False)
    assert watched.asked == [7, 7, 7]


def test_it_hears_a_stop() -> None:
    watched = Watched()
    watched.answers.put((False, True))
    bell = Bell(watched, 1)
    for thread in [t for t in threading.enumerate() if t.name == "bell"]:
        thread.join(10)
    assert bell.signals == Signals(newcomers=False, stop=True)


def test_it_stops_watching_when_its_generation_is_over() -> None:
    watched = Watched()
    bell = Bell(watched, 1)
    thread = thread_of(bell)
    bell.close()
    watched.answers.put((False, False))
    thread.join(10)
    assert not thread.is_alive()
    assert bell.signals == Signals()
