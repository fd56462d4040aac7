"""What both viewers of a sweep say in the same words: counts, hyperparameters, the best trial, the summary at the end.

Values to text, no terminal. Nothing that a task, a metric or an error is called may move a cursor: `tidy` a view first.
Runs in the driver.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from raytrain.events.sweep import COMPLETED, FAILED, PAUSED, PENDING, RUNNING, STOPPED, SweepView, TrialView
from raytrain.events.words import clean, count_of, format_number
from raytrain.units import format_count, format_seconds

STATES = (PENDING, RUNNING, PAUSED, COMPLETED, STOPPED, FAILED)
"""In the order in which they are counted."""

ENDED = (COMPLETED, STOPPED, FAILED)

MAX_FAILED = 5

TOGETHER = {"raised by ": 2, "fix:": 4}
"""How an error's last line begins -> how many of its lines say something only together."""


def tidy(view: SweepView) -> SweepView:
    """The view with names that hold no control characters; values and messages are cleaned where they become text."""
    trials = [
        replace(trial, name=clean(trial.name), values={clean(name): value for name, value in trial.values.items()})
        for trial in view.trials
    ]
    name, directory, metric = clean(view.name), clean(view.directory), clean(view.metric)
    return replace(view, name=name, directory=directory, metric=metric, trials=tuple(trials))


def counts(view: SweepView, without: Container[str] = ()) -> dict[str, int]:
    """How many trials there are in each state, but for those named in `without`; those not made yet are pending."""
    states = [trial.state for trial in view.trials if trial.name not in without]
    found = {state: states.count(state) for state in STATES}
    found[PENDING] += max(0, view.num_trials - len(view.trials))
    return {state: count for state, count in found.items() if count}


def format_counts(found: Mapping[str, int]) -> str:
    """{"pending": 5, "stopped": 12} -> '5 pending, 12 stopped'."""
    return ", ".join(f"{format_count(count)} {state}" for state, count in found.items())


def num_ended(view: SweepView) -> int:
    """Trials that train no more."""
    return sum(trial.state in ENDED for trial in view.trials)


def short_value(value: Any) -> str:
    """A hyperparameter to look at: 0.0123456 -> '0.0123'."""
    return f"{value:.3g}" if isinstance(value, float) else clean(str(value))


def format_short(values: Mapping[str, Any]) -> str:
    """'lr 0.0123, hidden 128'."""
    return ", ".join(f"{name} {short_value(value)}" for name, value in values.items())


def format_exact(values: Mapping[str, Any]) -> str:
    """'lr 0.0123456, hidden 128': to be used again."""
    return ", ".join(f"{name} {clean(str(value))}" for name, value in values.items())


def format_best(trial: TrialView, view: SweepView) -> str:
    """'valid/accuracy 0.975 at step 460', the best value of a trial; empty if there is none."""
    point = trial.best(view.mode)
    return f"{view.metric} {format_number(point[1])} at step {point[0]}" if point else ""


def failure(trial: TrialView) -> str:
    """'at step 46: ValueError: boom'."""
    cause = last_words(trial.message)
    return f"at step {trial.step}: {cause}" if cause else f"at step {trial.step}"


def last_words(message: str) -> str:
    """One line: the last one of an error, with those above it that it does not make sense without."""
    lines = [line for part in message.splitlines() if (line := clean(part).strip())]
    last = lines[-1] if lines else ""
    num_lines = next((number for start, number in TOGETHER.items() if last.startswith(start)), 1)
    return " · ".join(lines[-num_lines:])


def summary(view: SweepView, now: float | None) -> list[str]:
    """How the sweep ended, as of `now` in Unix seconds: a few lines; empty if it has not."""
    if not view.outcome:
        return []
    took = f", after {format_seconds(max(0.0, now - view.started))}" if now is not None else ""
    best = view.best
    go_on = "start the same job again: trials that have ended stay as they are, the others go on"
    pairs = [
        (view.outcome, f"{num_ended(view)} of {count_of(view.num_trials, 'trial')} ended{took}"),
        ("best", f"{best.name}, {format_best(best, view)}" if best else f"no trial has a value of {view.metric}"),
        ("settings", format_exact(best.values) if best else ""),
        ("directory", f"{view.directory.rstrip('/')}/{best.name}" if best else view.directory),
        ("trials", _fates(view)),
        *_failed(view),
        ("go on", go_on if view.outcome == STOPPED else ""),
    ]
    return [f"{name:<12} {text}" for name, text in pairs if text]


def _fates(view: SweepView) -> str:
    """'7 completed, 12 stopped early, 1 failed'; trials that a stopped sweep left are neither running nor pending now."""
    found = counts(view)
    left = {"unfinished": sum(found.values()) - num_ended(view)}
    fates = {"completed": found.get(COMPLETED, 0), "stopped early": found.get(STOPPED, 0), "failed": found.get(FAILED, 0)}
    return format_counts({name: count for name, count in (fates | left).items() if count})


def _failed(view: SweepView) -> list[tuple[str, str]]:
    failed = [trial for trial in view.trials if trial.state == FAILED]
    shown = failed if len(failed) <= MAX_FAILED else failed[: MAX_FAILED - 1]
    lines = [("failed", f"{trial.name} {failure(trial)}") for trial in shown]
    return lines if len(shown) == len(failed) else [*lines, ("failed", f"and {len(failed) - len(shown)} more")]
