"""The worker's side of the rendezvous, with an actor that answers by itself, or is away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from raytrain.rendezvous import client
from raytrain.rendezvous.client import ANSWERS_WITHIN_S, RETRY_EVERY_S, RayRendezvousClient
from raytrain.rendezvous.generation import NOBODY, Entrant, Generation, Signals
from raytrain.rendezvous.vitals import Answer, Beat

ME = Entrant("w0", 3, ("127.0.0.1", 1))
MINE = Generation(4, (ME,), "loss")
BEAT = Beat("w0", 3, "in loss", 0.5, False)
LIMIT_S = 60.0


class Actor:
    """Answers each call, whatever it is, with the next of `answers`; an error among them is raised.

    A pair of seconds and an answer takes so long.
    """

    def __init__(self, answers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers, self.asked, self.now = answers, [], 0.0  # type: ignore[var-annotated]
        for name in ("enter", "watch", "beat", "close"):
            setattr(self, name, SimpleNamespace(remote=self._noting(name)))
        context = SimpleNamespace(current_actor="my handle")
        monkeypatch.setattr(client, "ray", SimpleNamespace(get=self._get, get_runtime_context=lambda: context))
        self.client = RayRendezvousClient(self, LIMIT_S, sleep=self._sleep, clock=lambda: self.now)

    def _noting(self, name: str) -> Any:
        return lambda *arguments: self.asked.append((name, *arguments))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _get(self, reference: Any, timeout: float | None = None) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, tuple):
            seconds, answer = answer
            self.now += seconds
        if isinstance(answer, Exception):
            raise answer
        return answer


AWAY = ActorUnavailableError("away", None)


def test_entering_returns_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Actor([MINE], monkeypatch)
    assert actor.client.enter(ME) is MINE
    assert actor.asked == [("enter", ME, "my handle")]


def test_a_worker_that_was_taken_for_dead_enters_again(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Actor([NOBODY, NOBODY, MINE], monkeypatch)
    assert actor.client.enter(ME) is MINE
    assert len(actor.asked) == 3


def test_the_end_of_the_run_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Actor([NOBODY, None], monkeypatch).client.enter(ME) is None


def test_calls_are_repeated_while_the_actor_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Actor([AWAY, AWAY, MINE, AWAY, Signals(stop=True), AWAY, None], monkeypatch)
    assert actor.client.enter(ME) is MINE
    assert actor.client.watch(4) == Signals(stop=True)
    actor.client.close()
    assert [name for name, *_ in actor.asked] == ["enter"] * 3 + ["watch"] * 2 + ["close"] * 2
    assert actor.now == pytest.approx(4 * RETRY_EVERY_S)


def test_r6_an_actor_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Actor([AWAY] * 1000, monkeypatch)
    with pytest.raises(ActorUnavailableError):
        actor.client.enter(ME)
    assert LIMIT_S < actor.now < LIMIT_S + 2 * RETRY_EVERY_S


def test_p1_an_actor_that_dies_while_a_worker_has_waited_in_it_for_an_hour_may_be_away_as_long_as_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor = Actor([(3600.0, AWAY), *[AWAY] * 100, (3600.0, AWAY), AWAY, MINE], monkeypatch)
    assert actor.client.enter(ME) is MINE
    assert 100 * RETRY_EVERY_S > ANSWERS_WITHIN_S


def test_the_first_heartbeat_brings_the_handle_and_later_ones_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Answer(is_broken=False, is_known=True)
    actor = Actor([MINE, known, known, Answer(is_broken=True, is_known=True)], monkeypatch)
    actor.client.enter(ME)
    assert [actor.client.beat(BEAT) for _ in range(3)] == [False, False, True]
    sent = [(beat.generation, handle) for name, beat, handle in actor.asked if name == "beat"]
    assert sent == [(MINE, "my handle"), (Generation(4, (), "loss"), None), (Generation(4, (), "loss"), None)]


def test_a_rendezvous_that_was_started_again_is_told_everything_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known, unknown = Answer(is_broken=False, is_known=True), Answer(is_broken=False, is_known=False)
    actor = Actor([MINE, known, unknown, known, known], monkeypatch)
    actor.client.enter(ME)
    for _ in range(3):
        actor.client.beat(BEAT)
    handles = [handle for name, _, handle in actor.asked if name == "beat"]
    assert handles == ["my handle", None, "my handle", None]


def test_a_heartbeat_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one says more, and the thread that sends it must not hang."""
    actor = Actor([AWAY], monkeypatch)
    with pytest.raises(ActorUnavailableError):
        actor.client.beat(BEAT)
    assert len(actor.asked) == 1
