"""The worker's side of the rendezvous, with an actor that answers by itself, or is away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from raytrain.rendezvous import client
from raytrain.rendezvous.client import FAST_FAILURE_S, RETRY_EVERY_S, RayRendezvousClient
from raytrain.rendezvous.health import Heartbeat, HeartbeatReply
from raytrain.rendezvous.state import EMPTY_GENERATION, Generation, JoinRequest, Signals

ME = JoinRequest("w0", 3, ("127.0.0.1", 1))
MINE = Generation(4, (ME,), "loss")
BEAT = Heartbeat("w0", 3, "in loss", 0.5, False)
LIMIT_S = 60.0


class Actor:
    """Answers each call, whatever it is, with the next of `answers`; an error among them is raised.

    A pair of seconds and an answer takes so long.
    """

    def __init__(self, answers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers, self.asked, self.now = answers, [], 0.0  # type: ignore[var-annotated]
        for name in ("join", "watch", "heartbeat", "close"):
            setattr(self, name, SimpleNamespace(remote=lambda *given, name=name: self.asked.append((name, *given))))
        context = SimpleNamespace(current_actor="my handle")
        monkeypatch.setattr(client, "ray", SimpleNamespace(get=self._get, get_runtime_context=lambda: context))
        self.client = RayRendezvousClient(self, LIMIT_S, sleep=self._sleep, clock=lambda: self.now)

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


@pytest.mark.parametrize("answers", [[MINE], [EMPTY_GENERATION, EMPTY_GENERATION, MINE], [EMPTY_GENERATION, None]])
def test_a_worker_joins_until_it_has_a_generation_or_the_run_is_over(
    monkeypatch: pytest.MonkeyPatch, answers: list[Generation | None]
) -> None:
    actor = Actor([*answers], monkeypatch)
    assert actor.client.join(ME) is answers[-1]
    assert actor.asked == [("join", ME, "my handle")] * len(answers)


def test_calls_are_repeated_while_the_actor_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Actor([AWAY, AWAY, MINE, AWAY, Signals(stop=True), AWAY, None], monkeypatch)
    assert actor.client.join(ME) is MINE
    assert actor.client.watch(4) == Signals(stop=True)
    actor.client.close()
    assert [name for name, *_ in actor.asked] == ["join"] * 3 + ["watch"] * 2 + ["close"] * 2
    assert actor.now == pytest.approx(4 * RETRY_EVERY_S)


def test_r6_an_actor_that_stays_down_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Actor([AWAY] * 1000, monkeypatch)
    with pytest.raises(ActorUnavailableError):
        actor.client.join(ME)
    assert LIMIT_S < actor.now < LIMIT_S + 2 * RETRY_EVERY_S


def test_p1_time_spent_waiting_in_the_actor_is_not_counted_as_downtime(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Actor([(3600.0, AWAY), *[AWAY] * 100, (3600.0, AWAY), AWAY, MINE], monkeypatch)
    assert actor.client.join(ME) is MINE
    assert 100 * RETRY_EVERY_S > FAST_FAILURE_S


def test_handle_and_members_are_sent_once_and_again_when_they_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [HeartbeatReply(*reply) for reply in ((False, True), (False, False), (False, True), (True, True))]
    actor = Actor([MINE, *replies], monkeypatch)
    actor.client.join(ME)
    assert [actor.client.heartbeat(BEAT) for _ in range(3)] == [False, False, True]
    short = Generation(4, (), "loss")
    sent = [(beat.generation, handle) for name, beat, handle in actor.asked if name == "heartbeat"]
    assert sent == [(MINE, "my handle"), (short, None), (MINE, "my handle"), (short, None)]


def test_a_heartbeat_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one says more, and the thread that sends it must not hang."""
    actor = Actor([AWAY], monkeypatch)
    with pytest.raises(ActorUnavailableError):
        actor.client.heartbeat(BEAT)
    assert len(actor.asked) == 1
