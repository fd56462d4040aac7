"""Who gets which workers: nobody less than its own, nobody more than it can use, and nothing moves without a reason."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.tune.deal import NO_HELP_S, Player, Waiting, deal, ranks, room_for, spare, workers_worth

PLAYERS = st.lists(
    st.builds(
        lambda low, more, has, rank: (low, low + more, has, rank),
        st.integers(1, 3),
        st.integers(0, 5),
        st.integers(1, 8),
        st.floats(0, 1),
    ),
    max_size=6,
).map(lambda rows: [Player(f"t{number}", *row) for number, row in enumerate(rows)])
POLICIES = st.sampled_from(["fair", "best"])


@given(PLAYERS, st.integers(0, 20), POLICIES)
def test_everybody_has_its_own_and_all_that_is_spare_is_used(players: list[Player], num_spare: int, policy: str) -> None:
    given_out = deal(players, num_spare, policy)
    assert all(player.low <= given_out[player.name] <= player.high for player in players)
    num_given = sum(given_out[player.name] - player.low for player in players)
    assert num_given == min(num_spare, sum(player.high - player.low for player in players))


@given(PLAYERS, st.integers(0, 20), POLICIES)
def test_dealing_again_moves_nobody(players: list[Player], num_spare: int, policy: str) -> None:
    first = deal(players, num_spare, policy)
    again = [Player(one.name, one.low, one.high, first[one.name], one.rank) for one in players]
    assert deal(again, num_spare, policy) == first


@given(PLAYERS, st.integers(0, 20))
def test_fair_nobody_has_two_more_than_one_who_could_use_more(players: list[Player], num_spare: int) -> None:
    given_out = deal(players, num_spare, "fair")
    for rich in players:
        for poor in players:
            if given_out[rich.name] > rich.low and given_out[poor.name] < poor.high:
                assert given_out[rich.name] <= given_out[poor.name] + 1


def test_best_gives_all_that_the_highest_ranked_can_use_and_the_rest_to_the_next() -> None:
    players = [Player("a", 1, 3, 1, rank=0.5), Player("b", 1, 3, 1, rank=0.0), Player("c", 1, 3, 1, rank=1.0)]
    assert deal(players, 3, "best") == {"a": 2, "b": 3, "c": 1}


@pytest.mark.parametrize(
    ("free", "extra", "waiting", "expected"),
    [
        (2, 1, [], 3),
        (0, 3, [2], 1),  # two have to go
        (1, 1, [3], 2),  # nobody could make enough room
        (0, 4, [3, 1], 0),
        (0, 3, [3, 1], 2),  # the small one is helped, the large one cannot be any more
        (2, 0, [1, 1, 1], 0),
    ],
)
def test_what_others_wait_for_is_kept_back_where_that_helps(
    free: int, extra: int, waiting: list[int], expected: int
) -> None:
    assert spare(free, extra, waiting) == expected


@given(st.integers(-2, 8), st.integers(0, 8), st.lists(st.integers(1, 6), max_size=6))
def test_room_is_kept_back_for_as_many_as_it_can_help_and_for_nobody_else(free: int, extra: int, waiting: list[int]) -> None:
    total = max(0, free) + extra
    helped = [sum(sorted(waiting)[:number]) for number in range(len(waiting) + 1)]
    assert spare(free, extra, waiting) == total - max(kept for kept in helped if kept <= total)


CURVES = st.dictionaries(
    st.sampled_from("abcdef"), st.dictionaries(st.sampled_from([10, 20, 30]), st.floats(-9, 9), max_size=3), max_size=6
)


@given(CURVES)
def test_ranks_are_shares_and_the_best_of_each_rung_has_none_before_it(curves: dict[str, dict[int, float]]) -> None:
    found = ranks(curves, "min")
    assert found.keys() == curves.keys()
    assert all(0.0 <= rank < 1.0 for name, rank in found.items() if curves[name])
    for rung in {max(curve) for curve in curves.values() if curve}:
        there = {name: curve[rung] for name, curve in curves.items() if rung in curve}
        for name, value in there.items():
            if max(curves[name]) == rung and value == min(there.values()):
                assert found[name] == 0.0
    turned = {name: {step: -value for step, value in curve.items()} for name, curve in curves.items()}
    assert ranks(turned, "max") == found


def test_the_rank_is_that_among_all_who_came_as_far_whatever_they_did_later() -> None:
    curves = {"slow": {10: 0.5}, "fast": {10: 0.4, 20: 0.9}, "third": {10: 0.6, 20: 0.8}, "new": {}, "nan": {10: math.nan}}
    assert ranks(curves, "max") == {"slow": 0.25, "fast": 0.0, "third": 0.5, "new": 1.0, "nan": 1.0}
    assert ranks(curves, "min")["third"] == 0.0


def test_room_is_counted_in_whole_workers_of_what_is_scarcest() -> None:
    assert room_for({"CPU": 3.9, "GPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}) == 2
    assert room_for({"CPU": 1.5}, {"CPU": 0.5}) == 3
    assert room_for({"CPU": 8.0}, {"CPU": 1.0, "GPU": 1.0}) == 0
    assert workers_worth([{"CPU": 1.0}, {"CPU": 1.5, "node:head": 0.001}], {"CPU": 1.0}) == 3
    assert workers_worth([{"TPU": 4.0}], {"CPU": 1.0}) == 0


def test_one_whom_room_does_not_help_is_not_waited_for_for_ever() -> None:
    waiting = Waiting()
    assert waiting.look({"stuck": 1, "large": 5, "nothing of ours": 0}, 2, now=0.0) == [1, 5]
    assert waiting.look({"stuck": 1, "large": 5}, 2, now=NO_HELP_S) == [1, 5]
    assert waiting.look({"stuck": 1, "large": 5}, 2, now=NO_HELP_S + 0.1) == [5], "the large one never had room"
    assert waiting.look({"stuck": 1}, 0, now=NO_HELP_S + 1) == [1], "without room it may be room that it waits for"


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 3)), max_size=20), st.integers(1, 3))
def test_one_who_waits_is_given_up_only_after_room_for_all_of_that_time(looks: list[tuple[float, int]], need: int) -> None:
    waiting, now, room_since = Waiting(), 0.0, None
    for after_s, num_free in looks:
        now += after_s
        room_since = (now if room_since is None else room_since) if need <= num_free else None
        is_given_up = room_since is not None and now - room_since > NO_HELP_S
        assert waiting.look({"one": need}, num_free, now) == ([] if is_given_up else [need])
