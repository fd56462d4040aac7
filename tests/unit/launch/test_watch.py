"""The driver hands on each event once, passes the wish to stop on once, and gives up after the grace time."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain.events.kinds import Event, Printed
from raytrain.launch import watch
from raytrain.launch.stopping import StopWish
from raytrain.launch.watch import Nobody, StopLimit, Watch


class Remote:
    """A method of an actor: what it returns is there at once, or later."""

    def __init__(self, method: Any) -> None:
        self.remote = method


class Sink:
    def __init__(self, before: int) -> None:
        self.events: list[Event] = [printed(i) for i in range(before)]
        self.opened_at = Remote(lambda: before)
        self.since = Remote(lambda number: ("answer", self.events[number:]))
        self.is_slow = False


class Rendezvous:
    def __init__(self) -> None:
        self.num_stops = 0
        self.stop = Remote(self._stop)

    def _stop(self) -> None:
        self.num_stops += 1


class Seen:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.num_ticks = 0

    def on_events(self, events: Sequence[Event]) -> None:
        self.texts += [event.text for event in events if isinstance(event, Printed)]

    def tick(self, now: float) -> None:
        self.num_ticks += 1

    def say(self, text: str, now: float) -> None:
        self.texts.append(text)


def printed(number: int) -> Event:
    return Printed(rank=0, stream="stdout", text=str(number))


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Sink:
    """A sink with two events of an earlier driver, and a Ray that asks nobody."""
    made = Sink(before=2)
    fake = SimpleNamespace(
        get=lambda answer: answer[1] if isinstance(answer, tuple) else answer,
        wait=lambda answers, timeout: ([] if made.is_slow else answers, []),
    )
    monkeypatch.setattr(watch, "ray", fake)
    return made


def test_each_new_event_is_shown_once_and_in_order(sink: Sink) -> None:
    seen = Seen()
    watching = Watch(sink, Rendezvous(), seen, StopWish(), 2.5)
    watching.look()
    sink.events += [printed(2), printed(3)]
    watching.look()
    watching.look()
    sink.events.append(printed(4))
    watching.last_look()
    assert seen.texts == ["2", "3", "4"]
    assert seen.num_ticks == 3


def test_an_answer_that_is_not_there_is_not_waited_for(sink: Sink) -> None:
    seen = Seen()
    watching = Watch(sink, Rendezvous(), seen, StopWish(), 2.5)
    sink.events.append(printed(2))
    sink.is_slow = True
    watching.look()
    assert (seen.texts, seen.num_ticks) == ([], 1)


def test_r16_a_second_signal_in_the_middle_of_a_look_shows_nothing_twice(sink: Sink) -> None:
    seen = Seen()
    watching = Watch(sink, Rendezvous(), seen, StopWish(), 2.5)
    sink.events.append(printed(2))
    watching.look()
    asked = sink.since
    sink.since = Remote(lambda number: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        watching.look()
    sink.since = asked
    sink.events.append(printed(3))
    watching.last_look()
    assert seen.texts == ["2", "3"]


def test_r16_the_wish_to_stop_is_passed_on_once_and_has_a_limit(sink: Sink) -> None:
    now, rendezvous = [0.0], Rendezvous()
    wish = StopWish(clock=lambda: now[0])
    watching = Watch(sink, rendezvous, Nobody(), wish, 2.5)
    watching.look()
    assert rendezvous.num_stops == 0
    wish.on_signal(signal.SIGTERM, None)
    watching.look()
    now[0] = 2.4
    watching.look()
    assert rendezvous.num_stops == 1
    now[0] = 2.6
    with pytest.raises(StopLimit, match=r"did not finish a step and save it within 2\.5 s"):
        watching.look()
