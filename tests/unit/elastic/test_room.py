"""When a group begins, when it is worth a restart, and what is asked for and given back."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain.elastic import room as module
from raytrain.elastic.room import GROW_SETTLE_S, START_SETTLE_S, Room, Steady, is_worth_a_restart, num_to_begin


@pytest.mark.parametrize(
    ("num_free", "steady_s", "settled_s", "begins"),
    [
        (4, 0.0, 0.0, 4),
        (5, 0.0, 0.0, 4),
        (3, START_SETTLE_S, START_SETTLE_S, 3),
        (2, START_SETTLE_S, START_SETTLE_S, 2),
        (3, START_SETTLE_S / 2, START_SETTLE_S, 0),
        (3, 1000.0, START_SETTLE_S / 2, 0),
        (1, 1000.0, 1000.0, 0),
    ],
)
def test_as_many_begin_as_there_is_room_for_once_no_more_is_to_be_expected(
    num_free: int, steady_s: float, settled_s: float, begins: int
) -> None:
    assert num_to_begin(num_free, steady_s, (2, 4), settled_s) == begins


@pytest.mark.parametrize(
    ("num_free", "steady_s", "has_trained", "is_worth"),
    [
        (1, GROW_SETTLE_S, True, True),
        (1, GROW_SETTLE_S - 1, True, False),
        (0, 1000.0, True, False),
        (2, 1000.0, False, False),
    ],
)
def test_a_restart_must_be_worth_it(num_free: int, steady_s: float, has_trained: bool, is_worth: bool) -> None:
    assert is_worth_a_restart(num_free, steady_s, has_trained) == is_worth


def test_a_number_is_steady_since_it_last_changed() -> None:
    steady = Steady()
    assert [steady.look(value, now) for value, now in ((1, 5.0), (1, 7.0), (2, 8.0), (2, 8.5), (1, 9.0))] == [
        *(0.0, 2.0, 0.0, 0.5, 0.0)
    ]


class Cluster:
    """Has room for a number of placement groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_places = 1
        self.asked: list[Any] = []
        monkeypatch.setattr(module, "placement_group", self._ask)
        monkeypatch.setattr(module, "remove_placement_group", self.asked.remove)
        monkeypatch.setattr(module, "placement_group_table", self._describe)

    def _ask(self, bundles: list[dict[str, float]]) -> Any:
        assert bundles == [{"CPU": 0.2}]
        self.asked.append(object())
        return self.asked[-1]

    def _describe(self, group: Any) -> dict[str, str]:
        return {"state": "CREATED" if self.asked.index(group) < self.num_places else "PENDING"}


def test_each_worker_is_asked_for_by_itself_and_what_has_its_place_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, room = Cluster(monkeypatch), Room({"CPU": 0.2})
    room.ask(3)
    assert len(cluster.asked) == 3
    assert room.look(1.0) == (1, 0.0)
    assert room.look(2.0) == (1, 1.0)
    cluster.num_places = 2
    assert room.look(3.0) == (2, 0.0)
    room.ask(1)
    assert len(cluster.asked) == 1
    assert room.look(3.0) == (1, 0.0)


def test_r16_everything_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, room = Cluster(monkeypatch), Room({"CPU": 0.2})
    room.ask(3)
    room.give_back()
    assert cluster.asked == []
    assert room.look(9.0) == (0, 0.0)
