"""The broker's table: who claims, what waits in the cluster, and what follows for each trial."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain.elastic.places import extra_prefix
from raytrain.elastic.quota import Claim
from raytrain.tune.table import RANKS_HOLD_S, SILENT_S, Table, extra_workers

WORKER = {"CPU": 1.0}


class Scene:
    """A cluster of placement groups, and two trials of one to four workers."""

    def __init__(self, policy: str = "fair", max_workers: int | None = None) -> None:
        self.table = Table(policy, "max", max_workers)
        self.groups: dict[str, dict[str, Any]] = {}
        self.now = 100.0
        for name in ("sweep/trial-1", "sweep/trial-11"):
            self.claim(name)

    def claim(self, name: str) -> None:
        self.table.claims[name] = Claim(name, 1, 4, WORKER), self.now

    def group(self, state: str, name: str = "", num_workers: int = 1) -> None:
        bundles = {number: {"CPU": 1.0} for number in range(num_workers)}
        self.groups[f"id {len(self.groups)}"] = {"name": name, "state": state, "bundles": bundles}

    def look(self, num_free: int) -> dict[str, int]:
        self.table.look(self.groups, {"CPU": float(num_free)}, self.now)
        return self.table.quotas


def test_what_is_free_and_what_trials_have_beyond_their_own_is_dealt_out() -> None:
    scene = Scene()
    assert scene.look(3) == {"sweep/trial-1": 3, "sweep/trial-11": 2}
    scene.group("CREATED", f"{extra_prefix('sweep/trial-1')}x")
    scene.group("CREATED", f"{extra_prefix('sweep/trial-11')}y")
    scene.group("REMOVED", f"{extra_prefix('sweep/trial-11')}z")
    assert scene.look(0) == {"sweep/trial-1": 2, "sweep/trial-11": 2}


def test_a_trial_that_waits_takes_extra_workers_back_but_extra_workers_that_wait_do_not() -> None:
    scene = Scene()
    scene.group("CREATED", f"{extra_prefix('sweep/trial-1')}x")
    scene.group("CREATED", f"{extra_prefix('sweep/trial-11')}y")
    scene.group("PENDING", f"{extra_prefix('sweep/trial-1')}z")
    assert sum(scene.look(0).values()) == 4
    scene.group("PENDING", "", num_workers=2)
    assert scene.look(0) == {"sweep/trial-1": 1, "sweep/trial-11": 1}


def test_what_lost_its_node_and_is_placed_again_waits_too() -> None:
    scene = Scene()
    scene.group("CREATED", f"{extra_prefix('sweep/trial-1')}x")
    scene.group("RESCHEDULING")
    assert sum(scene.look(0).values()) == 2


def test_one_whom_no_room_would_help_takes_nothing_back() -> None:
    scene = Scene()
    scene.group("CREATED", f"{extra_prefix('sweep/trial-1')}x")
    scene.group("PENDING", num_workers=9)
    assert sum(scene.look(0).values()) == 3


def test_extra_workers_are_those_of_the_trial_of_just_this_name() -> None:
    names = ["sweep/trial-1", "sweep/trial-11", "other/trial-1"]
    groups = {str(number): {"name": f"{extra_prefix(name)}x", "state": "CREATED"} for number, name in enumerate(names)}
    assert extra_workers(groups, names[:2]) == {"sweep/trial-1": 1, "sweep/trial-11": 1}


def test_a_new_broker_takes_workers_that_trials_have_as_theirs() -> None:
    """So that nobody's worker has to move since the broker died."""
    scene = Scene()
    scene.group("CREATED", f"{extra_prefix('sweep/trial-11')}x")
    assert scene.look(0) == {"sweep/trial-1": 1, "sweep/trial-11": 2}


def test_a_look_says_whether_anything_is_another_number_than_before() -> None:
    scene = Scene()
    looks = [scene.table.look({}, {"CPU": float(num_free)}, scene.now) for num_free in (1, 1, 2)]
    assert looks == [True, False, True]
    assert scene.table.look({}, {}, scene.now + SILENT_S) is True, "nobody has anything any more"
    assert scene.table.look({}, {}, scene.now + SILENT_S) is False


def test_a_silent_trial_is_over_and_its_share_goes_to_others() -> None:
    scene = Scene()
    scene.look(2)
    scene.now += SILENT_S
    scene.claim("sweep/trial-1")
    assert scene.look(2) == {"sweep/trial-1": 3}
    scene.now += SILENT_S
    assert scene.look(2) == {}


def test_all_trials_together_have_at_most_the_sweeps_workers() -> None:
    assert sum(Scene(max_workers=3).look(8).values()) == 3
    assert sum(Scene(max_workers=1).look(8).values()) == 2, "their own are theirs"


@pytest.mark.parametrize(("policy", "expected"), [("best", 4), ("fair", 2)])
def test_the_best_trial_gets_what_it_can_use_only_if_that_is_the_policy(policy: str, expected: int) -> None:
    scene = Scene(policy)
    scene.table.curves = {"sweep/trial-1": {10: 0.1}, "sweep/trial-11": {10: 0.9}}
    assert scene.look(3)["sweep/trial-11"] == expected


def test_workers_do_not_change_hands_with_each_report() -> None:
    scene = Scene("best")
    scene.table.curves = {"sweep/trial-1": {10: 0.1}, "sweep/trial-11": {10: 0.9}}
    scene.look(3)
    scene.table.curves["sweep/trial-1"][10] = 1.0
    assert scene.look(3)["sweep/trial-11"] == 4
    scene.now += RANKS_HOLD_S
    for name in ("sweep/trial-1", "sweep/trial-11"):
        scene.claim(name)
    assert scene.look(3)["sweep/trial-1"] == 4
