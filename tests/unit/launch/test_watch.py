"""The driver hands on each event once, asks for a stop until it comes, and shows the end also without the log."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from raytrain.events.kinds import Event, Printed, RunEnded
from raytrain.launch import watch
from raytrain.launch.stopping import StopWish
from raytrain.launch.watch import ASK_AGAIN_S, END_LIMIT_S, Nobody, StopLimit, Watch

ENDED = RunEnded(outcome="completed", step=9, message="", time=1.0)


class Remote:
    """A method of an actor: what it returns is there at once, or later."""

    def __init__(self, method: Any) -> None:
        self.remote = method


class Sink:
    """Has some events of an earlier driver. While it `is_away` what is asked of it fails; what it is told is lost."""

    def __init__(self, before: int) -> None:
        self.events: list[Event] = [printed(i) for i in range(before)]
        self.opened_at = Remote(lambda: before)
        self.since = Remote(lambda number: AWAY if self.is_away else ("answer", self.events[number:]))
        self.append = Remote(lambda events: self.is_away or self.events.extend(events))
        self.close = Remote(lambda: AWAY if self.is_away else self.closed.append(True))
        self.closed: list[bool] = []
        self.is_slow = self.is_away = self.hangs = False


AWAY = ActorUnavailableError("away", None)


class Rendezvous:
    def __init__(self) -> None:
        self.num_stops = 0
        self.stop = Remote(self._stop)

    def _stop(self) -> None:
        self.num_stops += 1


class Seen:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ends: list[Event] = []
        self.num_ticks = 0

    def on_events(self, events: Sequence[Event]) -> None:
        self.texts += [event.text for event in events if isinstance(event, Printed)]
        self.ends += [event for event in events if isinstance(event, RunEnded)]

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

    def get(answer: Any, timeout: float | None = None) -> Any:
        if made.hangs:
            raise GetTimeoutError("no answer")
        if isinstance(answer, Exception):
            raise answer
        return answer[1] if isinstance(answer, tuple) else answer

    fake = SimpleNamespace(get=get, wait=lambda answers, timeout: ([] if made.is_slow else answers, []))
    monkeypatch.setattr(watch, "ray", fake)
    monkeypatch.setattr(watch, "ASK_EVERY_S", 0.0)
    return made


def test_each_new_event_is_shown_once_and_in_order(sink: Sink) -> None:
    seen = Seen()
    watching = Watch(sink, Rendezvous(), seen, StopWish(), 2.5)
    watching.look()
    sink.events += [printed(2), printed(3)]
    watching.look()
    watching.look()
    sink.events.append(printed(4))
    watching.finish(ENDED)
    assert seen.texts == ["2", "3", "4"]
    assert seen.ends == [ENDED]
    assert seen.num_ticks == 3
    assert sink.closed == [True]


def test_the_sink_is_not_asked_at_every_look(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ASK_EVERY_S", 0.5)
    seen, now = Seen(), [10.0]
    watching = Watch(sink, Rendezvous(), seen, StopWish(), 2.5, clock=lambda: now[0])
    sink.events.append(printed(2))
    watching.look()
    now[0] = 10.4
    watching.look()
    assert seen.texts == []
    now[0] = 10.5
    watching.look()
    assert seen.texts == ["2"]


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
    watching.finish(ENDED)
    assert seen.texts == ["2", "3"]
    assert seen.ends == [ENDED]


def test_p1_while_the_sink_is_away_nothing_is_shown_and_afterwards_everything_once(sink: Sink) -> None:
    seen = Seen()
    watching = Watch(sink, Rendezvous(), seen, StopWish(), 2.5)
    watching.look()
    sink.is_away = True
    for _ in range(3):
        watching.look()
    sink.events += [printed(2), printed(3)]
    sink.is_away = False
    for _ in range(3):
        watching.look()
    assert seen.texts == ["2", "3"]
    assert seen.num_ticks == 7


@pytest.mark.parametrize("how", ["is_away", "hangs"])
def test_r6_the_end_is_shown_also_where_the_log_cannot_be_reached(sink: Sink, how: str) -> None:
    seen = Seen()
    watching = Watch(sink, Rendezvous(), seen, StopWish(), 2.5)
    setattr(sink, how, True)
    watching.finish(ENDED)
    assert seen.ends == [ENDED]
    assert sink.closed == ([] if how == "is_away" else [True])


def test_r6_the_end_waits_for_the_log_for_a_limited_time(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    get = watch.ray.get
    monkeypatch.setattr(watch.ray, "get", lambda answer, timeout: limits.append(timeout) or get(answer, timeout))
    watching = Watch(sink, Rendezvous(), Seen(), StopWish(), 2.5)
    del limits[:]
    watching.finish(ENDED)
    assert limits == [END_LIMIT_S] * 3
    sink.hangs = True
    del limits[:]
    watching.finish(ENDED)
    assert limits == [END_LIMIT_S, 0.1], "it is not waited for again"


def test_r16_the_wish_to_stop_is_passed_on_and_has_a_limit(sink: Sink) -> None:
    now, rendezvous = [0.0], Rendezvous()
    wish = StopWish(clock=lambda: now[0])
    watching = Watch(sink, rendezvous, Nobody(), wish, 2.5, clock=lambda: now[0])
    watching.look()
    assert rendezvous.num_stops == 0
    wish.on_signal(signal.SIGTERM, None)
    for now[0] in (0.0, 0.25, 0.5):
        watching.look()
    assert rendezvous.num_stops == 1
    now[0] = 2.6
    with pytest.raises(StopLimit, match=r"did not finish a step and save it within 2\.5 s"):
        watching.look()


def test_r6_a_stop_is_asked_for_again_since_a_rendezvous_that_was_started_anew_does_not_know(sink: Sink) -> None:
    now, rendezvous = [0.0], Rendezvous()
    wish = StopWish(clock=lambda: now[0])
    watching = Watch(sink, rendezvous, Nobody(), wish, 100.0, clock=lambda: now[0])
    wish.on_signal(signal.SIGTERM, None)
    for tenth in range(51):
        now[0] = tenth / 10
        watching.look()
    assert rendezvous.num_stops == pytest.approx(5.0 / ASK_AGAIN_S, abs=1)
