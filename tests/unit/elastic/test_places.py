"""Places: reserved ones first and again, others named so that the broker knows them, each given back once."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain.elastic import places as module
from raytrain.elastic.places import Places, Share, extra_prefix


class Groups:
    """Ray's placement groups, as the test plays them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[Any, str]] = []
        self.removed: list[Any] = []
        self.state = "CREATED"
        monkeypatch.setattr(module, "placement_group", self._make)
        monkeypatch.setattr(module, "remove_placement_group", self.removed.append)
        monkeypatch.setattr(module, "placement_group_table", lambda group: {"state": self.state})

    def _make(self, bundles: Any, name: str) -> str:
        self.made.append((bundles, name))
        return f"group {len(self.made)}"


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    return Groups(monkeypatch)


def test_a_run_on_its_own_asks_for_one_group_per_worker_and_gives_it_back_once(groups: Groups) -> None:
    place = Places({"CPU": 1.0}).take()
    assert groups.made == [([{"CPU": 1.0}], "")]
    assert (place.is_reserved, place.is_there) == (False, True)
    groups.state = "PENDING"
    assert not place.is_there
    place.give_back()
    place.give_back()
    assert groups.removed == ["group 1"]


def test_a_run_that_shares_takes_its_reserved_places_first_and_takes_them_again(groups: Groups) -> None:
    places = Places({"CPU": 1.0}, Share(None, "sweep/trial-1", "reserved", (1, 2)))
    first, second, third = places.take(), places.take(), places.take()
    assert [place.is_reserved for place in (first, second, third)] == [True, True, False]
    assert [name.startswith(extra_prefix("sweep/trial-1")) for _, name in groups.made] == [True]
    second.give_back()
    second.give_back()
    assert places.take().is_reserved
    assert not places.take().is_reserved, "given back once, taken once"
    assert groups.removed == []


def test_the_groups_of_one_trial_are_not_those_of_another_with_a_longer_name() -> None:
    assert not f"{extra_prefix('sweep/trial-11')}x".startswith(extra_prefix("sweep/trial-1"))
