"""Lines that both viewers show in the same way: printed lines, clock times, the summary at the end of a run.

Values to text, no terminal. Runs in the driver.
"""

from __future__ import annotations

import time
from dataclasses import replace

from raytrain.events.kinds import CheckpointSaved, EvaluationDone, Event, Printed, StepSkipped
from raytrain.events.ledger import TITLES, Ledger
from raytrain.events.view import Note, RunView, reduce
from raytrain.events.words import clean, count_of, format_metrics
from raytrain.rundir import CHECKPOINTS
from raytrain.units import format_seconds

ROUTINE = (EvaluationDone, CheckpointSaved, StepSkipped)
"""Events that may come in each second; the newest of each is shown among the numbers."""

LEAST_SHOWN_S = 0.0005  # what would be shown as 0 ms is left out


def printed_line(event: Printed) -> str:
    """'[rank 0] text'."""
    return f"[rank {event.rank}] {clean(event.text)}"


def clock(unix_s: float) -> str:
    """The time of day in the local time zone: '14:02:11'."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def begun_again(view: RunView) -> RunView:
    """What is known of a run that goes on, for a new start: how it ended before, and its workers, are past."""
    past = replace(view, ended=None, members=(), lost=frozenset(), starting=(), waiting=None, recent=(), notes=())
    return replace(past, books=view.books.ended())


def take(view: RunView, event: Event) -> RunView:
    """The view after one more event; routine ones leave no note, so that they do not push out the others."""
    after = reduce(view, event)
    return replace(after, notes=view.notes) if isinstance(event, ROUTINE) else after


def with_note(view: RunView, text: str, now: float) -> RunView:
    """The view with one more note; `now` in Unix seconds."""
    return replace(view, notes=(*view.notes, Note(now, text)))


def where_time_went(ledger: Ledger) -> list[tuple[str, str]]:
    """Class and time of what took any, the longest first: [("training", "81.2 s"), ("starting", "2.2 s")]."""
    classes = sorted(ledger.known().items(), key=lambda item: -item[1])
    return [(TITLES[name], format_seconds(seconds)) for name, seconds in classes if seconds >= LEAST_SHOWN_S]


def summary(view: RunView) -> list[str]:
    """How the run ended: a few lines; empty if it has not."""
    if view.ended is None or view.run is None:
        return []
    took = format_seconds(max(0.0, view.ended.time - view.run.time))
    step = f"step {view.step} of {view.num_steps}, epoch {view.epoch} of {view.num_epochs}"
    pairs = [
        (view.ended.outcome, f"{step}, after {took}"),
        ("cause", _cause(view.ended.message)),
        ("last", _evaluation(view.evaluation)),
        ("best", _evaluation(view.best)),
        ("survived", _survived(view)),
        ("goodput", _goodput(view)),
        ("checkpoints", f"{view.run.directory.rstrip('/')}/{CHECKPOINTS}" if view.checkpoint else ""),
        ("go on", "" if view.ended.outcome == "completed" else _how_to_go_on(view)),
    ]
    return [f"{name:<12} {text}" for name, text in pairs if text]


def _cause(message: str) -> str:
    """One line; of a traceback, which is shown elsewhere, its last two: the exception, and who raised it."""
    lines = [clean(line).strip() for line in message.splitlines() if line.strip()]
    return " · ".join(lines[-2:] if any(line.startswith("Traceback") for line in lines) else lines)


def _evaluation(done: EvaluationDone | None) -> str:
    return f"{format_metrics(done.metrics)} at step {done.step}" if done else ""


def _survived(view: RunView) -> str:
    counts = [(view.num_lost, "lost worker"), (view.num_joins, "join"), (view.num_skipped, "skipped step")]
    return ", ".join(count_of(count, noun) for count, noun in counts if count)


def _goodput(view: RunView) -> str:
    ledger, starts = view.books.at(), view.books.sessions
    times = ", ".join(f"{title} {seconds}" for title, seconds in where_time_went(ledger))
    wall = format_seconds(ledger.wall_s) + (f" in {starts} starts" if starts > 1 else "")
    return f"{100 * ledger.goodput:.1f} % of {wall}: {times}" if times else ""


def _how_to_go_on(view: RunView) -> str:
    start = f"from step {view.checkpoint.step}" if view.checkpoint else "from the beginning, since nothing was saved yet"
    again = "mend the cause and start" if view.ended and view.ended.outcome == "failed" else "start"
    return f"{again} the same job again: it goes on {start}"
