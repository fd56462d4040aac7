"""How many workers to ask for, when a run has lost too many, and how a shortage reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.elastic.capacity import LossBudget, num_to_ask_for, shortage


@pytest.mark.parametrize(
    ("running", "asked", "finished", "most", "wanted"),
    [(0, 0, 0, 4, 4), (2, 0, 0, 4, 2), (2, 1, 0, 4, 1), (2, 2, 0, 4, 0), (4, 1, 0, 4, 0), (2, 0, 1, 4, 0)],
)
def test_what_is_missing_is_asked_for_once_and_not_at_the_end(
    running: int, asked: int, finished: int, most: int, wanted: int
) -> None:
    assert num_to_ask_for(running, asked, finished, most) == wanted


def test_as_many_losses_in_a_row_as_are_allowed_are_borne() -> None:
    budget = LossBudget(2)
    assert [budget.lose(7), budget.lose(7), budget.lose(7)] == [True, True, False]


def test_a_budget_of_none_bears_no_loss() -> None:
    assert not LossBudget(0).lose(0)


def test_a_finished_step_makes_up_for_the_losses_before() -> None:
    budget = LossBudget(1)
    assert [budget.lose(step) for step in (0, 1, 2, 3, 3)] == [True, True, True, True, False]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(0, 4))
def test_a_run_ends_exactly_when_too_many_are_lost_without_progress(moves: list[int], most: int) -> None:
    budget, step, in_a_row = LossBudget(most), 0, 0
    for move in moves:
        in_a_row = 1 if move else in_a_row + 1
        step += move
        assert budget.lose(step) == (in_a_row <= most)


def test_r11_a_shortage_names_what_was_asked_for_and_what_there_is() -> None:
    text = shortage({"CPU": 0.5, "GPU": 1.0}, 4, {"CPU": 2.0, "memory": 1e9})
    assert text == "asked for 2 CPU, the cluster has 2; asked for 4 GPU, the cluster has 0"


def test_resources_of_zero_are_not_mentioned() -> None:
    assert shortage({"CPU": 1.0, "GPU": 0}, 2, {"CPU": 1.0}) == "asked for 2 CPU, the cluster has 1"
