"""Allocation: a trial keeps its smallest group, all spare workers are used, and no worker moves without a reason."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain.tune import allocation
from raytrain.tune.allocation import PENDING_LIMIT_S, PendingGroups, TrialDemand, allocate, ranks, spare_workers

ROWS = st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(1, 8), st.floats(0, 1))
DEMANDS = st.lists(ROWS, max_size=6).map(
    lambda rows: [TrialDemand(f"t{i}", low, low + more, now, rank) for i, (low, more, now, rank) in enumerate(rows)]
)


@pytest.mark.parametrize("policy", ["fair", "best"])
@given(demands=DEMANDS, num_spare=st.integers(0, 20))
@settings(max_examples=50)
def test_trials_keep_their_groups_and_share_all_spare_workers_stably(
    policy: str, demands: list[TrialDemand], num_spare: int
) -> None:
    found = allocate(demands, num_spare, policy)
    assert all(one.min_workers <= found[one.name] <= one.max_workers for one in demands)
    num_given = sum(found[one.name] - one.min_workers for one in demands)
    assert num_given == min(num_spare, sum(one.max_workers - one.min_workers for one in demands))
    again = [TrialDemand(one.name, one.min_workers, one.max_workers, found[one.name], one.rank) for one in demands]
    assert allocate(again, num_spare, policy) == found, "a second time, nothing moves"
    if policy == "fair":
        rich = max((found[one.name] for one in demands if found[one.name] > one.min_workers), default=0)
        poor = min((found[one.name] for one in demands if found[one.name] < one.max_workers), default=rich)
        assert rich <= poor + 1


@pytest.mark.parametrize("policy", ["fair", "best"])
def test_of_equal_trials_the_one_that_has_a_worker_keeps_it(policy: str) -> None:
    assert allocate([TrialDemand("a", 1, 3, 1), TrialDemand("b", 1, 3, 2)], 1, policy) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("free", "extra", "pending", "expected"),
    [
        *((2, 1, [], 3), (-1, 3, [2], 1)),
        (1, 1, [3], 2),  # all extra workers together would not make enough room
        (0, 4, [3, 1], 0),
        (0, 3, [3, 1], 2),  # the small one is served, then there is not enough for the large one
        (2, 0, [1, 1, 1], 0),
    ],
)
def test_room_is_kept_for_pending_groups_that_it_helps(free: int, extra: int, pending: list[int], expected: int) -> None:
    assert spare_workers(free, extra, pending) == expected


def test_the_rank_is_among_all_trials_that_came_as_far() -> None:
    curves = {"slow": {10: 0.5}, "fast": {10: 0.4, 20: 0.9}, "third": {10: 0.6, 20: 0.8}, "new": {}, "nan": {10: math.nan}}
    assert ranks(curves, "max") == {"slow": 0.25, "fast": 0.0, "third": 0.5, "new": 1.0, "nan": 1.0}
    assert ranks(curves, "min") == {"slow": 0.25, "fast": 0.5, "third": 0.0, "new": 1.0, "nan": 1.0}


def test_room_is_counted_in_whole_workers_of_the_scarcest_resource() -> None:
    assert allocation.workers_that_fit({"CPU": 3.9, "GPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}) == 2
    assert allocation.workers_that_fit({"CPU": 1.5}, {"CPU": 0.5}) == 3
    assert allocation.workers_that_fit({"CPU": 8.0}, {"CPU": 1.0, "GPU": 1.0}) == 0
    assert allocation.workers_to_release([{"CPU": 1.0}, {"CPU": 1.5, "node:head": 0.001}], {"CPU": 1.0}) == 3
    assert allocation.workers_to_release([{"TPU": 4.0}], {"CPU": 1.0}) == 0


def test_a_group_that_stays_pending_despite_room_is_ignored() -> None:
    pending = PendingGroups()
    assert pending.update({"stuck": 1, "large": 5, "nothing of ours": 0}, 2, now=0.0) == [1, 5]
    assert pending.update({"stuck": 1, "large": 5}, 2, now=PENDING_LIMIT_S) == [1, 5]
    assert pending.update({"stuck": 1, "large": 5}, 2, now=PENDING_LIMIT_S + 0.1) == [5], "the large one never had room"
    assert pending.update({"stuck": 1}, 0, now=PENDING_LIMIT_S + 1) == [1], "without room it may be room that it needs"
    assert pending.update({"stuck": 1}, 2, now=PENDING_LIMIT_S + 2) == [1], "its time begins again"
