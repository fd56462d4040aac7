"""The controller's line to the broker: nothing waits, and what was said last holds while the broker is away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from raytrain.elastic import quota as module
from raytrain.elastic.places import Share
from raytrain.elastic.quota import Claim, Quota


class Broker:
    """Answers when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: int | Exception | None = None
        self.held: list[Claim] = []
        self.asked: list[tuple[str, int]] = []
        self.hold = SimpleNamespace(remote=self.held.append)
        self.changed = SimpleNamespace(remote=lambda name, known: self.asked.append((name, known)) or "reference")
        self.leave = SimpleNamespace(remote=lambda name: None)
        monkeypatch.setattr(module, "ray", SimpleNamespace(wait=self._wait, get=self._get))

    def _wait(self, references: list[Any], timeout: float) -> Any:
        assert timeout == 0
        return (references, []) if self.answer is not None else ([], references)

    def _get(self, reference: Any) -> int:
        answer, self.answer = self.answer, None
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    return Broker(monkeypatch)


def quota(broker: Broker) -> Quota:
    return Quota(Share(broker, "sweep/trial", None, (1,)), 1, 4, {"CPU": 1.0})


def test_a_run_on_its_own_may_have_what_it_can_use() -> None:
    alone = Quota(None, 1, 4, {"CPU": 1.0})
    alone.look(2, 7)
    alone.leave()
    assert alone.num == 4


def test_a_run_that_shares_begins_with_its_own_and_takes_what_the_broker_says(broker: Broker) -> None:
    shared = quota(broker)
    assert shared.num == 1
    shared.look(1, 0)
    shared.look(1, 3)
    assert (broker.held[-1], broker.asked) == (
        Claim("sweep/trial", 1, 4, {"CPU": 1.0}, num_workers=1, step=3),
        [("sweep/trial", 1)],
    ), "it is asked once, and told each time"
    broker.answer = 3
    shared.look(1, 4)
    assert (shared.num, broker.asked[-1]) == (3, ("sweep/trial", 3))


@pytest.mark.parametrize(("said", "expected"), [(9, 4), (0, 1)])
def test_it_never_has_less_than_its_own_or_more_than_it_can_use(broker: Broker, said: int, expected: int) -> None:
    shared = quota(broker)
    shared.look(1, 0)
    broker.answer = said
    shared.look(1, 0)
    assert shared.num == expected


def test_while_the_broker_is_away_the_last_word_holds_and_it_is_asked_again(broker: Broker) -> None:
    shared = quota(broker)
    shared.look(1, 0)
    broker.answer = 3
    shared.look(1, 0)
    broker.answer = ActorDiedError()
    shared.look(3, 0)
    assert (shared.num, len(broker.asked)) == (3, 3)
