"""Slots: reserved ones first and again, others named so that the broker knows them, each given back once."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain.elastic import placement as module
from raytrain.elastic.placement import ResourceLease, Slots, extra_prefix


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


def test_a_run_of_its_own_has_a_placement_group_per_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch)
    slot = Slots({"CPU": 1.0}).request()
    assert groups.made == [([{"CPU": 1.0}], "")]
    assert (slot.is_reserved, slot.is_placed) == (False, True)
    groups.state = "PENDING"
    assert not slot.is_placed
    slot.release()
    slot.release()
    assert groups.removed == ["group 1"]


def test_reserved_slots_are_used_first_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch)
    slots = Slots({"CPU": 1.0}, ResourceLease(None, "sweep/trial-1", "reserved", (1, 2)))
    first, second, third = slots.request(), slots.request(), slots.request()
    assert [slot.is_reserved for slot in (first, second, third)] == [True, True, False]
    assert [name.startswith(extra_prefix("sweep/trial-1")) for _, name in groups.made] == [True]
    second.release()
    second.release()
    assert slots.request().is_reserved
    assert not slots.request().is_reserved, "released once, used once"
    assert groups.removed == []
    assert not extra_prefix("sweep/trial-11").startswith(extra_prefix("sweep/trial-1"))
