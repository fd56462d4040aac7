"""Which worker holds which logical worker: all of them, once each, in order, as equally as possible."""

from __future__ import annotations

import pytest

from raytrain.plan.layout import held_by

LAYOUTS = [(ranks, logical) for logical in range(1, 41) for ranks in range(1, logical + 1)]


@pytest.mark.parametrize("num_logical", range(1, 41))
def test_each_logical_worker_is_held_once_for_any_number_of_ranks(num_logical: int) -> None:
    for num_ranks in range(1, num_logical + 1):
        parts = [held_by(rank, num_ranks, num_logical) for rank in range(num_ranks)]
        assert [logical for part in parts for logical in part] == list(range(num_logical))


def test_ranks_differ_by_at_most_one_logical_worker_and_none_is_idle() -> None:
    for num_ranks, num_logical in LAYOUTS:
        sizes = [len(held_by(rank, num_ranks, num_logical)) for rank in range(num_ranks)]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1


def test_one_rank_holds_all_and_as_many_ranks_as_logical_workers_hold_one_each() -> None:
    assert held_by(0, 1, 7) == range(7)
    assert [held_by(rank, 7, 7) for rank in range(7)] == [range(rank, rank + 1) for rank in range(7)]
    assert [held_by(rank, 3, 8) for rank in range(3)] == [range(3), range(3, 6), range(6, 8)]
