"""The summaries say how a run or a sweep ended, what was best, and how to resume."""

from __future__ import annotations

import math

import pytest

from raytrain.console.messages import (
    MAX_FAILED,
    count_states,
    failure,
    format_counts,
    format_values,
    resumed,
    run_summary,
    sweep_summary,
    where_time_went,
)
from raytrain.errors import ConfigError
from raytrain.events import kinds
from raytrain.events.goodput import Ledger
from raytrain.events.sweep import SweepView, TrialView
from raytrain.events.view import fold, reduce
from tests.support.demo_run import START, demo_events
from tests.support.demo_sweep import FAILURE, demo_views


def ended(outcome: str, num_steps: int = 100, message: str = "") -> list[str]:
    end = kinds.RunEnded(time=START + 60, outcome=outcome, step=num_steps, message=message)
    return run_summary(reduce(fold(demo_events(num_steps)), end))


def test_r10_a_run_that_did_not_complete_says_how_to_resume_it() -> None:
    assert ended("completed", 460)[0] == "completed    step 460 of 460, epoch 20 of 20, after 1 min 0 s"
    assert "resume" not in "\n".join(ended("completed", 460))
    assert ended("stopped")[-1] == "resume       start the same job again: it resumes from step 92"
    assert ended("stopped", 10)[-1].endswith("from the beginning, since nothing was saved yet")
    assert ended("failed")[-1].startswith("resume       correct the cause and start the same job again: ")
    assert run_summary(fold(demo_events(100))) == []


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "Traceback (most recent call last):\n  File x\nValueError: boom\nraised by loss at step 3 on rank 1",
            "ValueError: boom · raised by loss at step 3 on rank 1",
        ),
        (
            "Training failed:\nTraceback (most recent call last):\n  File x\nRuntimeError: odd\n",
            "File x · RuntimeError: odd",
        ),
        (
            str(ConfigError("run.steps", 0, "at least 1", "leave it out")),
            "run.steps · value: 0 · rule:  at least 1 · fix:   leave it out",
        ),
    ],
)
def test_r16_the_summary_keeps_the_cause_in_one_line(message: str, cause: str) -> None:
    assert ended("failed", message=message)[1] == f"cause        {cause}"


def test_the_summary_says_where_the_time_of_all_starts_went() -> None:
    (line,) = [line for line in ended("completed", 460) if line.startswith("goodput")]
    times = "stopping 32.0 s, training 22.8 s, starting 5.0 s, evaluation 168 ms, checkpoint stall 4 ms"
    assert line == f"goodput      38.0 % of 1 min 0 s: {times}"
    again = fold(demo_events(460, ended=True), fold(demo_events(100)))
    assert " % of 38.5 s in 2 starts: " in "\n".join(run_summary(again))


def test_what_took_no_time_is_not_shown() -> None:
    ledger = Ledger(starting_s=2.0, training_s=81.2, reforming_s=0.0004)
    assert where_time_went(ledger) == [("training", "1 min 21 s"), ("starting", "2.0 s")]


def test_while_a_killed_run_starts_again_its_past_does_not_grow() -> None:
    killed = fold(demo_events(100))
    assert resumed(killed).goodput.at(START + 1e6).wall_s == killed.goodput.at().wall_s


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


def sweep_ended(view: SweepView) -> dict[str, str]:
    lines = sweep_summary(view, START + 90)
    return {line[:12].strip(): line[13:] for line in lines}


def test_a_completed_sweep_names_its_best_trial_with_all_that_is_needed_to_use_it() -> None:
    now, view = list(demo_views())[-1]
    assert sweep_summary(view, now) == [
        "completed    20 of 20 trials ended, after 2 min 4 s",
        "best         trial-0011, valid/accuracy 0.9635 at step 437",
        "settings     lr 0.07854562503635422, hidden 256",
        "directory    /home/me/runs/digits/trial-0011",
        "trials       6 completed, 13 stopped early, 1 failed",
        "failed       trial-0006 at step 46: ValueError: the loss is not finite · raised by loss at step 46 on rank 0",
    ]


def test_a_stopped_sweep_says_what_is_unfinished_and_how_to_resume() -> None:
    running = TrialView(name="b", state="running", curve=((4, 0.5),))
    lines = sweep_ended(sweep(TrialView(name="a", state="completed"), running, num_trials=5, outcome="stopped"))
    assert lines["stopped"] == "1 of 5 trials ended, after 1 min 30 s"
    assert lines["trials"] == "1 completed, 4 unfinished"
    assert lines["best"] == "b, loss 0.5 at step 4"
    assert lines["resume"].startswith("start the same job again: ")


def test_a_sweep_without_a_value_says_so() -> None:
    lines = sweep_ended(sweep(TrialView(name="a", state="completed", curve=((1, math.nan),)), outcome="completed"))
    assert lines["best"] == "no trial has a value of loss"
    assert lines["directory"] == "/runs/s/"
    assert "resume" not in lines


def test_of_many_failed_trials_the_first_are_told() -> None:
    failed = [TrialView(name=f"t{i}", state="failed", message="boom" if i else "") for i in range(9)]
    lines = [line for line in sweep_summary(sweep(*failed, outcome="completed"), None) if line.startswith("failed")]
    assert len(lines) == MAX_FAILED
    assert lines[0] == "failed       t0 at step 0"
    assert lines[1] == "failed       t1 at step 0: boom"
    assert lines[-1] == "failed       and 5 more"


def test_trials_that_are_not_made_yet_are_pending() -> None:
    view = sweep(TrialView(name="a", state="pending"), TrialView(name="b", state="stopped"), num_trials=7)
    assert format_counts(count_states(view)) == "6 pending, 1 stopped"
    assert count_states(view, without={"a"}) == {"pending": 5, "stopped": 1}


def test_the_last_line_of_an_error_comes_with_what_it_needs_to_make_sense() -> None:
    def cause(message: str) -> str:
        return failure(TrialView(name="t", step=46, message=message))

    assert cause("Traceback:\n  File x\nRuntimeError: odd\n\n") == "at step 46: RuntimeError: odd"
    assert cause(FAILURE) == "at step 46: ValueError: the loss is not finite · raised by loss at step 46 on rank 0"
    parts = "lr · value: 0 · rule:  above 0 · fix:   raise it"
    assert cause(str(ConfigError("lr", 0, "above 0", "raise it"))) == f"at step 46: {parts}"
    assert cause("") == cause("\n \n") == "at step 46"


def test_hyperparameters_are_short_to_look_at_and_exact_to_use_again() -> None:
    values = {"lr": 0.0123456789, "hidden": 12345678, "nesterov": True, "act": "relu", "clip": None}
    assert format_values(values) == "lr 0.0123, hidden 12345678, nesterov True, act relu, clip None"
    assert format_values(values, exact=True) == "lr 0.0123456789, hidden 12345678, nesterov True, act relu, clip None"
