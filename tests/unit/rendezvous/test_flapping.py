"""Newcomers from nodes whose workers keep dying young wait longer and longer."""

from __future__ import annotations

import pytest

from raytrain.rendezvous.flapping import FIRST_WAIT_S, LONGEST_WAIT_S, SHORT_LIFE_S, Flapping


def lives(flapping: Flapping, node: str, *lengths_s: float) -> None:
    for number, length_s in enumerate(lengths_s):
        flapping.admit(f"{node}-{number}", node, 100.0)
        flapping.lose(f"{node}-{number}", 100.0 + length_s)


@pytest.mark.parametrize(
    ("num_short", "wait_s"), [(0, 0.0), (1, 0.0), (2, 5.0), (3, 10.0), (4, 20.0), (7, 160.0), (8, 300.0), (5000, 300.0)]
)
def test_the_wait_doubles_with_each_short_life_after_the_first(num_short: int, wait_s: float) -> None:
    flapping = Flapping()
    lives(flapping, "a", *[1.0] * num_short)
    assert flapping.wait_s("a") == wait_s
    assert flapping.wait_s("b") == 0.0
    assert FIRST_WAIT_S <= wait_s <= LONGEST_WAIT_S or not wait_s


def test_a_long_life_makes_up_for_the_short_ones_before() -> None:
    flapping = Flapping()
    lives(flapping, "a", 1.0, 1.0, 1.0, SHORT_LIFE_S)
    assert flapping.wait_s("a") == 0.0
    lives(flapping, "a", 1.0)
    assert flapping.wait_s("a") == 0.0


def test_a_life_begins_with_the_first_generation_and_not_with_the_latest() -> None:
    flapping = Flapping()
    lives(flapping, "a", 1.0, 1.0)
    flapping.admit("w", "a", 0.0)
    flapping.admit("w", "a", 99.0)
    flapping.lose("w", 100.0)
    assert flapping.wait_s("a") == 0.0


def test_one_that_was_never_let_in_has_cost_nothing() -> None:
    flapping = Flapping()
    for number in range(5):
        flapping.lose(f"w{number}", 1.0)
    lives(flapping, "", 1.0, 1.0, 1.0)
    assert (flapping.wait_s("a"), flapping.wait_s("")) == (0.0, 0.0), "nor has one whose node is not known"
