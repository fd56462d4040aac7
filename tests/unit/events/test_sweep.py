"""The best trial of a sweep is found over the whole history of all trials."""

from __future__ import annotations

import math

from raytrain.events.sweep import SweepView, TrialView


def trial(name: str, *values: float) -> TrialView:
    return TrialView(name=name, curve=tuple((10 * (i + 1), value) for i, value in enumerate(values)))


def best_of(mode: str, *trials: TrialView) -> str | None:
    view = SweepView(name="s", directory="/s", metric="loss", mode=mode, num_trials=3, trials=trials)
    return view.best.name if view.best else None


def test_the_best_value_may_be_an_old_one_and_of_equals_the_first_counts() -> None:
    assert trial("a", 3.0, 1.0, 2.0, 1.0).best("min") == (20, 1.0)
    assert trial("a", 3.0, 1.0, 3.0).best("max") == (10, 3.0)


def test_the_newest_value_is_the_last_one_even_if_it_is_not_a_number() -> None:
    assert trial("a", 3.0, 2.0).newest == 2.0
    assert math.isnan(trial("a", 3.0, math.nan).newest or 0.0)
    assert trial("a").newest is None


def test_values_that_are_not_finite_are_never_the_best() -> None:
    assert trial("a", math.nan, 2.0, -math.inf).best("min") == (20, 2.0)
    assert trial("a", math.inf, 2.0).best("max") == (20, 2.0)
    assert trial("a", math.nan).best("max") is None


def test_the_best_trial_is_the_one_with_the_best_value_and_the_earlier_one_of_equals() -> None:
    trials = [trial("a", 2.0, 5.0), trial("b", 1.0, 9.0), trial("c", 9.0, 1.0)]
    assert best_of("min", *trials) == "b"
    assert best_of("max", *trials) == "b"
    assert best_of("max", *reversed(trials)) == "c"


def test_without_a_value_no_trial_is_the_best() -> None:
    assert best_of("min") is None
    assert best_of("max", trial("a"), trial("b", math.nan)) is None
