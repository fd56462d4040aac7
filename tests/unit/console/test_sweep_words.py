"""The summary says how a sweep ended, what was best, and what failed."""

from __future__ import annotations

import math
from dataclasses import replace

from raytrain.console.sweep_demo import FAILURE, START, demo_views
from raytrain.console.sweep_words import MAX_FAILED, counts, format_counts, format_exact, format_short, last_words, summary
from raytrain.errors import ConfigError
from raytrain.events.sweep import SweepView, TrialView


def sweep(*trials: TrialView, num_trials: int = 0, outcome: str = "") -> SweepView:
    return SweepView(
        name="s",
        directory="/runs/s/",
        metric="loss",
        mode="min",
        num_trials=num_trials or len(trials),
        trials=trials,
        started=START,
        outcome=outcome,
    )


def ended(view: SweepView) -> dict[str, str]:
    lines = summary(view, START + 90)
    return {line[:12].strip(): line[13:] for line in lines}


def test_a_completed_sweep_names_its_best_trial_with_all_that_is_needed_to_use_it() -> None:
    now, view = list(demo_views())[-1]
    assert summary(view, now) == [
        "completed    20 of 20 trials ended, after 2 min 4 s",
        "best         trial-0011, valid/accuracy 0.9635 at step 437",
        "settings     lr 0.07854562503635422, hidden 256",
        "directory    /home/me/runs/digits/trial-0011",
        "trials       6 completed, 13 stopped early, 1 failed",
        "failed       trial-0006 at step 46: ValueError: the loss is not finite · raised by loss at step 46 on rank 0",
    ]


def test_a_stopped_sweep_says_what_is_unfinished_and_how_to_go_on() -> None:
    running = TrialView(name="b", state="running", curve=((4, 0.5),))
    lines = ended(sweep(TrialView(name="a", state="completed"), running, num_trials=5, outcome="stopped"))
    assert lines["stopped"] == "1 of 5 trials ended, after 1 min 30 s"
    assert lines["trials"] == "1 completed, 4 unfinished"
    assert lines["best"] == "b, loss 0.5 at step 4"
    assert lines["go on"].startswith("start the same job again: ")


def test_a_sweep_without_a_value_says_so() -> None:
    lines = ended(sweep(TrialView(name="a", state="completed", curve=((1, math.nan),)), outcome="completed"))
    assert lines["best"] == "no trial has a value of loss"
    assert lines["directory"] == "/runs/s/"
    assert "go on" not in lines


def test_a_sweep_that_has_not_ended_has_no_summary() -> None:
    assert summary(sweep(TrialView(name="a", state="running")), START) == []


def test_of_many_failed_trials_the_first_are_told() -> None:
    failed = [TrialView(name=f"t{i}", state="failed", message="boom" if i else "") for i in range(9)]
    lines = [line for line in summary(sweep(*failed, outcome="completed"), None) if line.startswith("failed")]
    assert len(lines) == MAX_FAILED
    assert lines[0] == "failed       t0 at step 0"
    assert lines[1] == "failed       t1 at step 0: boom"
    assert lines[-1] == "failed       and 5 more"


def test_trials_that_are_not_made_yet_are_pending() -> None:
    view = sweep(TrialView(name="a", state="pending"), TrialView(name="b", state="stopped"), num_trials=7)
    assert format_counts(counts(view)) == "6 pending, 1 stopped"
    assert counts(view, without={"a"}) == {"pending": 5, "stopped": 1}


def test_a_grid_that_turned_out_larger_than_told_does_not_count_below_zero() -> None:
    assert counts(sweep(TrialView(name="a"), TrialView(name="b"), num_trials=1)) == {"pending": 2}


def test_the_last_line_of_an_error_comes_with_what_it_needs_to_make_sense() -> None:
    assert last_words("Traceback:\n  File x\nRuntimeError: odd\n\n") == "RuntimeError: odd"
    assert last_words(FAILURE) == "ValueError: the loss is not finite · raised by loss at step 46 on rank 0"
    assert last_words(str(ConfigError("lr", 0, "above 0", "raise it"))) == "lr · value: 0 · rule:  above 0 · fix:   raise it"
    assert last_words("") == last_words("\n \n") == ""


def test_hyperparameters_are_short_to_look_at_and_exact_to_use_again() -> None:
    values = {"lr": 0.0123456789, "hidden": 12345678, "nesterov": True, "act": "relu", "clip": None}
    assert format_short(values) == "lr 0.0123, hidden 12345678, nesterov True, act relu, clip None"
    assert format_exact(values) == "lr 0.0123456789, hidden 12345678, nesterov True, act relu, clip None"


def test_a_view_is_not_changed_by_a_summary() -> None:
    view = list(demo_views())[-1][1]
    before = replace(view)
    summary(view, START)
    assert view == before
