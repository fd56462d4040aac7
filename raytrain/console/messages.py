"""What do the live and the plain view say in the same words? Clock times, hyperparameters, the summary at the end.

Values to text, no terminal. `tidy` removes control characters from the names in a sweep, which could move a cursor. Runs in
the driver.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from raytrain.events.goodput import TITLES, Ledger
from raytrain.events.kinds import CheckpointSaved, EvaluationDone, Event, OutputLine, StepSkipped
from raytrain.events.messages import clean, count_of, format_metrics, format_number
from raytrain.events.sweep import COMPLETED, FAILED, PAUSED, PENDING, RUNNING, STOPPED, SweepView, TrialView
from raytrain.events.view import Note, RunView, reduce
from raytrain.rundir import CHECKPOINTS
from raytrain.units import format_count, format_seconds

ROUTINE = (EvaluationDone, CheckpointSaved, StepSkipped)
"""Events that may occur every second; views show the newest of each among the numbers, not as a note."""
LEAST_SHOWN_S = 0.0005  # below, 0 ms would be shown

STATES = (PENDING, RUNNING, PAUSED, COMPLETED, STOPPED, FAILED)
ENDED = (COMPLETED, STOPPED, FAILED)
MAX_FAILED = 5
NUM_LAST_LINES = {"raised by ": 2, "fix:": 4}
"""How many of an error's last lines belong together, by the start of the last line."""


def printed_line(event: OutputLine) -> str:
    """'[rank 0] text'."""
    return f"[rank {event.rank}] {clean(event.text)}"


def clock(unix_s: float) -> str:
    """The time of day in the local time zone: '14:02:11'."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def table_of(pairs: list[tuple[str, str]]) -> list[str]:
    """Lines 'name         text', without those whose text is empty."""
    return [f"{name:<12} {text}" for name, text in pairs if text]


# A run.


def resumed(view: RunView) -> RunView:
    """The view of an earlier start as the initial view of a new one: without its end, workers and notes."""
    past = replace(view, ended=None, members=(), lost=frozenset(), starting=(), waiting=None, recent=(), notes=())
    return replace(past, goodput=view.goodput.closed())


def take(view: RunView, event: Event) -> RunView:
    """The view after one more event; routine events leave no note, so that they do not push out others."""
    after = reduce(view, event)
    return replace(after, notes=view.notes) if isinstance(event, ROUTINE) else after


def with_note(view: RunView, text: str, now: float) -> RunView:
    """The view with one more note; `now` in Unix seconds."""
    return replace(view, notes=(*view.notes, Note(now, text)))


def where_time_went(ledger: Ledger) -> list[tuple[str, str]]:
    """Title and time of each class, the longest first: [("training", "81.2 s"), ("starting", "2.2 s")]."""
    classes = sorted(ledger.known().items(), key=lambda item: -item[1])
    return [(TITLES[name], format_seconds(seconds)) for name, seconds in classes if seconds >= LEAST_SHOWN_S]


def run_summary(view: RunView) -> list[str]:
    """How the run ended; empty if it has not."""
    if view.ended is None or view.run is None:
        return []
    took = format_seconds(max(0.0, view.ended.time - view.run.time))
    done = f"step {view.step} of {view.num_steps}, epoch {view.epoch} of {view.num_epochs}, after {took}"
    counts = [(view.num_lost, "lost worker"), (view.num_joins, "join"), (view.num_skipped, "skipped step")]
    return table_of(
        [
            (view.ended.outcome, done),
            ("cause", _cause(view.ended.message)),
            ("last", _evaluation(view.evaluation)),
            ("best", _evaluation(view.best)),
            ("survived", ", ".join(count_of(count, noun) for count, noun in counts if count)),
            ("goodput", _goodput(view)),
            ("checkpoints", f"{view.run.directory.rstrip('/')}/{CHECKPOINTS}" if view.checkpoint else ""),
            ("resume", _how_to_resume(view)),
        ]
    )


def _cause(message: str) -> str:
    """One line; of a traceback, which is shown elsewhere, the last two lines: the exception, and the hook that raised it."""
    lines = [clean(line).strip() for line in message.splitlines() if line.strip()]
    return " · ".join(lines[-2:] if any(line.startswith("Traceback") for line in lines) else lines)


def _evaluation(done: EvaluationDone | None) -> str:
    return f"{format_metrics(done.metrics)} at step {done.step}" if done else ""


def _goodput(view: RunView) -> str:
    ledger, starts = view.goodput.at(), view.goodput.sessions
    times = ", ".join(f"{title} {seconds}" for title, seconds in where_time_went(ledger))
    wall = format_seconds(ledger.wall_s) + (f" in {starts} starts" if starts > 1 else "")
    return f"{100 * ledger.goodput:.1f} % of {wall}: {times}" if times else ""


def _how_to_resume(view: RunView) -> str:
    outcome = view.ended.outcome if view.ended else ""
    if outcome == "completed":
        return ""
    start = f"from step {view.checkpoint.step}" if view.checkpoint else "from the beginning, since nothing was saved yet"
    again = "correct the cause and start" if outcome == "failed" else "start"
    return f"{again} the same job again: it resumes {start}"


# A sweep.


def tidy(view: SweepView) -> SweepView:
    """The view with names that hold no control characters; values and messages are cleaned where they become text."""
    trials = [
        replace(trial, name=clean(trial.name), values={clean(name): value for name, value in trial.values.items()})
        for trial in view.trials
    ]
    name, directory, metric = clean(view.name), clean(view.directory), clean(view.metric)
    return replace(view, name=name, directory=directory, metric=metric, trials=tuple(trials))


def count_states(view: SweepView, without: Container[str] = ()) -> dict[str, int]:
    """Number of trials in each state, except those named in `without`; trials that do not exist yet are pending."""
    states = [trial.state for trial in view.trials if trial.name not in without]
    found = {state: states.count(state) for state in STATES}
    found[PENDING] += max(0, view.num_trials - len(view.trials))
    return {state: count for state, count in found.items() if count}


def format_counts(found: Mapping[str, int]) -> str:
    """{"pending": 5, "stopped": 12} -> '5 pending, 12 stopped'."""
    return ", ".join(f"{format_count(count)} {state}" for state, count in found.items() if count)


def ended_of(view: SweepView) -> str:
    """'7 of 20 trials ended'."""
    return f"{num_ended(view)} of {count_of(view.num_trials, 'trial')} ended"


def num_ended(view: SweepView) -> int:
    """Trials that train no more."""
    return sum(trial.state in ENDED for trial in view.trials)


def short_value(value: Any) -> str:
    """A hyperparameter with three digits: 0.0123456 -> '0.0123'."""
    return f"{value:.3g}" if isinstance(value, float) else clean(str(value))


def format_values(values: Mapping[str, Any], exact: bool = False) -> str:
    """'lr 0.0123, hidden 128'; exact: 'lr 0.0123456, hidden 128'."""
    return ", ".join(f"{name} {clean(str(value)) if exact else short_value(value)}" for name, value in values.items())


def format_best(trial: TrialView, view: SweepView) -> str:
    """'valid/accuracy 0.975 at step 460', the best value of a trial; empty if there is none."""
    point = trial.best(view.mode)
    return f"{view.metric} {format_number(point[1])} at step {point[0]}" if point else ""


def failure(trial: TrialView) -> str:
    """'at step 46: ValueError: boom'."""
    lines = [line for part in trial.message.splitlines() if (line := clean(part).strip())]
    last = lines[-1] if lines else ""
    num_lines = next((number for start, number in NUM_LAST_LINES.items() if last.startswith(start)), 1)
    cause = " · ".join(lines[-num_lines:])
    return f"at step {trial.step}: {cause}" if cause else f"at step {trial.step}"


def sweep_summary(view: SweepView, now: float | None) -> list[str]:
    """How the sweep ended, as of `now` in Unix seconds; empty if it has not."""
    if not view.outcome:
        return []
    took = f", after {format_seconds(max(0.0, now - view.started))}" if now is not None else ""
    best = view.best
    resume = "start the same job again: trials that have ended stay as they are, the others resume"
    return table_of(
        [
            (view.outcome, f"{ended_of(view)}{took}"),
            ("best", f"{best.name}, {format_best(best, view)}" if best else f"no trial has a value of {view.metric}"),
            ("settings", format_values(best.values, exact=True) if best else ""),
            ("directory", f"{view.directory.rstrip('/')}/{best.name}" if best else view.directory),
            ("trials", _outcomes(view)),
            *_failed(view),
            ("resume", resume if view.outcome == STOPPED else ""),
        ]
    )


def _outcomes(view: SweepView) -> str:
    """'7 completed, 12 stopped early, 1 failed'; trials that a stopped sweep left are neither running nor pending."""
    found = count_states(view)
    outcomes = {"completed": found.get(COMPLETED, 0), "stopped early": found.get(STOPPED, 0), "failed": found.get(FAILED, 0)}
    return format_counts(outcomes | {"unfinished": sum(found.values()) - num_ended(view)})


def _failed(view: SweepView) -> list[tuple[str, str]]:
    failed = [trial for trial in view.trials if trial.state == FAILED]
    shown = failed if len(failed) <= MAX_FAILED else failed[: MAX_FAILED - 1]
    lines = [("failed", f"{trial.name} {failure(trial)}") for trial in shown]
    return lines if len(shown) == len(failed) else [*lines, ("failed", f"and {len(failed) - len(shown)} more")]
