"""When a run has lost too many workers in a row, or the same rows kill each worker that gets them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.elastic.losses import SAME_STEP_LIMIT, Crashes, LossBudget


def test_as_many_losses_in_a_row_as_are_allowed_are_borne() -> None:
    budget = LossBudget(2)
    assert [budget.lose(7), budget.lose(7), budget.lose(7)] == [True, True, False]


def test_a_budget_of_none_bears_no_loss() -> None:
    assert not LossBudget(0).lose(0)


def test_a_finished_step_makes_up_for_the_losses_before() -> None:
    budget = LossBudget(1)
    assert [budget.lose(step) for step in (0, 1, 2, 3, 3)] == [True, True, True, True, False]


def test_steps_that_are_done_again_after_a_restart_from_a_checkpoint_are_no_progress() -> None:
    budget = LossBudget(1)
    assert [budget.lose(step) for step in (7, 5, 6)] == [True, False, False]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(0, 4))
def test_a_run_ends_exactly_when_too_many_are_lost_without_progress(moves: list[int], most: int) -> None:
    budget, step, in_a_row = LossBudget(most), 0, 0
    for move in moves:
        in_a_row = 1 if move else in_a_row + 1
        step += move
        assert budget.lose(step) == (in_a_row <= most)


def blamed(*deaths: tuple[int, set[int]]) -> list[set[int]]:
    crashes = Crashes()
    return [set(crashes.note(step, frozenset(held))) for step, held in deaths]


def test_r16_rows_that_were_with_each_of_three_deaths_in_one_step_are_to_blame() -> None:
    assert blamed((7, {0, 1, 2}), (7, {2, 3}), (7, {1, 2})) == [set(), set(), {2}]


def test_deaths_with_other_rows_blame_nobody() -> None:
    assert blamed((7, {0, 1}), (7, {2, 3}), (7, {1, 2})) == [set(), set(), set()]


def test_deaths_in_other_steps_begin_anew() -> None:
    assert blamed((7, {0}), (7, {0}), (8, {0}), (8, {0}), (8, {0})) == [set()] * 4 + [{0}]


def test_a_death_that_has_nothing_to_do_with_them_only_delays_the_verdict() -> None:
    assert blamed((7, {0}), (7, {5}), (7, {0}), (7, {0}), (7, {0})) == [set()] * 4 + [{0}]


@pytest.mark.parametrize("num", range(SAME_STEP_LIMIT))
def test_fewer_deaths_blame_nobody(num: int) -> None:
    assert not any(blamed(*[(7, {0})] * num))


@given(st.lists(st.tuples(st.integers(0, 2), st.frozensets(st.integers(0, 3), min_size=1)), max_size=20))
def test_only_what_was_with_each_of_the_last_deaths_is_blamed(deaths: list[tuple[int, frozenset[int]]]) -> None:
    crashes = Crashes()
    for number, (step, held) in enumerate(deaths):
        recent = deaths[max(0, number - SAME_STEP_LIMIT + 1) : number + 1]
        to_blame = crashes.note(step, held)
        assert all(to_blame <= one for _, one in recent)
        if to_blame:
            assert [when for when, _ in recent] == [step] * SAME_STEP_LIMIT
