"""What the controller knows of the rendezvous, without waiting for it, and also while it is away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from raytrain.elastic import liaison as module
from raytrain.elastic.liaison import FRESH_LIMIT_S, Liaison
from raytrain.rendezvous.actor import Survey

AWAY = ActorUnavailableError("away", None)


class Rendezvous:
    """Notes what it is told; its answers arrive when `is_slow` is not set, and are errors while it `is_away`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[Any] = []
        self.is_slow = self.is_away = False
        self.state, self.must_wait = Survey({}, frozenset(), (), -1), True
        for name in ("start", "lose", "give_up"):
            setattr(self, name, SimpleNamespace(remote=lambda *arguments, name=name: self.told.append((name, *arguments))))
        self.survey = SimpleNamespace(remote=lambda: self.asked("survey", AWAY if self.is_away else self.state))
        self.leave = SimpleNamespace(remote=lambda worker: self.asked("leave", AWAY if self.is_away else self.must_wait))
        self.limits: list[Any] = []
        fake = SimpleNamespace(get=self.get, wait=lambda answers, timeout: ([], answers) if self.is_slow else (answers, []))
        monkeypatch.setattr(module, "ray", fake)
        self.liaison = Liaison(self, num_logical=4)

    def asked(self, what: str, answer: Any) -> Any:
        self.told.append(what)
        return SimpleNamespace(answer=answer)

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        self.limits.append(timeout)
        if self.is_slow:
            raise GetTimeoutError("not yet")
        if isinstance(reference.answer, Exception):
            raise reference.answer
        return reference.answer


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Rendezvous:
    return Rendezvous(monkeypatch)


def test_before_the_first_survey_nothing_is_known(rendezvous: Rendezvous) -> None:
    liaison = rendezvous.liaison
    assert (liaison.step, liaison.given_up, liaison.left, liaison.held("w0")) == (0, {}, frozenset(), frozenset())


def test_a_look_takes_the_survey_that_was_asked_for_before_and_waits_for_none(rendezvous: Rendezvous) -> None:
    rendezvous.state = Survey({"w1": "silent"}, frozenset({"w2"}), ("w0", "w3"), 7)
    liaison = rendezvous.liaison
    liaison.look()
    assert liaison.step == 0
    rendezvous.state = Survey({}, frozenset(), (), 99)
    liaison.look()
    assert (liaison.step, liaison.given_up, liaison.left) == (7, {"w1": "silent"}, {"w2"})
    assert (liaison.held("w0"), liaison.held("w3"), liaison.held("w1")) == ({0, 1}, {2, 3}, frozenset())
    assert rendezvous.limits == [0.0]


def test_a_survey_that_is_not_there_is_not_asked_for_twice(rendezvous: Rendezvous) -> None:
    rendezvous.is_slow = True
    for _ in range(5):
        rendezvous.liaison.look()
    assert rendezvous.told == ["survey"]


def test_a_close_look_waits_for_the_state_of_this_moment_but_not_for_long(rendezvous: Rendezvous) -> None:
    rendezvous.state = Survey({}, frozenset(), ("w0",), 7)
    rendezvous.liaison.look_closely()
    assert rendezvous.liaison.step == 7
    assert rendezvous.limits == [FRESH_LIMIT_S]
    rendezvous.is_slow = True
    rendezvous.liaison.look_closely()
    assert rendezvous.liaison.step == 7


def test_r6_what_was_known_stays_while_the_rendezvous_is_away(rendezvous: Rendezvous) -> None:
    rendezvous.state = Survey({}, frozenset(), ("w0",), 7)
    rendezvous.liaison.look_closely()
    rendezvous.is_away = True
    for _ in range(3):
        rendezvous.liaison.look()
        rendezvous.liaison.look_closely()
    assert rendezvous.liaison.step == 7
    rendezvous.is_away, rendezvous.state = False, Survey({}, frozenset(), ("w1",), 9)
    rendezvous.liaison.look_closely()
    assert rendezvous.liaison.step == 9
    assert rendezvous.liaison.held("w0") == {0, 1, 2, 3}, "what it held when it was last heard of"


def test_a_worker_may_go_only_once_it_is_said_that_nothing_is_lost_with_it(rendezvous: Rendezvous) -> None:
    liaison = rendezvous.liaison
    assert not liaison.may_go("w0"), "it has only been asked"
    assert not liaison.may_go("w0")
    rendezvous.must_wait = False
    assert [liaison.may_go("w0") for _ in range(2)].count(True) == 1


def test_p2_that_a_worker_is_to_leave_is_said_again_since_a_rendezvous_that_was_started_anew_does_not_know(
    rendezvous: Rendezvous,
) -> None:
    liaison = rendezvous.liaison
    rendezvous.is_away = True
    assert [liaison.may_go("w0") for _ in range(4)] == [False] * 4
    rendezvous.is_away = False
    assert [liaison.may_go("w0") for _ in range(4)] == [False] * 4
    assert rendezvous.told.count("leave") >= 4


def test_an_answer_that_is_not_there_yet_is_not_waited_for(rendezvous: Rendezvous) -> None:
    rendezvous.is_slow, rendezvous.must_wait = True, False
    assert [rendezvous.liaison.may_go("w0") for _ in range(3)] == [False] * 3
    assert rendezvous.told == ["leave"]
    rendezvous.is_slow = False
    assert rendezvous.liaison.may_go("w0")


def test_the_rest_is_passed_on(rendezvous: Rendezvous) -> None:
    rendezvous.liaison.tell_start("w0")
    rendezvous.liaison.tell_loss("w0")
    rendezvous.liaison.tell_end_of_patience()
    assert rendezvous.told == [("start", "w0"), ("lose", "w0"), ("give_up",)]
