"""A run or a sweep as whole lines, where there is no terminal: files, job logs, pipes.

One line of progress per interval, and one line per notable event of a run or change in a sweep, which is found by comparing
with the view before. No carriage returns, no control characters, each line flushed. Runs in the driver.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TextIO

from raytrain.console.messages import (
    ENDED,
    ROUTINE,
    clock,
    ended_of,
    failure,
    format_best,
    format_values,
    num_ended,
    printed_line,
    resumed,
    run_summary,
    sweep_summary,
    take,
    tidy,
)
from raytrain.events import kinds
from raytrain.events.messages import clean, count_of, describe, format_metrics, format_number
from raytrain.events.sweep import COMPLETED, FAILED, PAUSED, PENDING, RUNNING, STOPPED, SweepView, TrialView
from raytrain.events.view import RunView
from raytrain.units import format_count, format_seconds

INTERVAL_S = 10.0
"""Seconds between two lines of progress, at least."""
ENDINGS = {COMPLETED: "completed", STOPPED: "stopped early", PAUSED: "paused"}


class _Lines:
    """Writes lines with the time of day."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def status(self, text: str, now: float) -> None:
        """Writes what the driver does; `now` in Unix seconds."""
        _write(self._out, f"{clock(now)} {clean(text)}")

    def close(self) -> None:
        self._out.flush()


class PlainViewer(_Lines):
    """Writes the lines of a run.

    Args:
        out: where lines go.
        err: where lines go that the task wrote to stderr.
        view: of a run that is resumed.
        interval_s: seconds between two lines of progress, at least.
    """

    def __init__(self, out: TextIO, err: TextIO, view: RunView | None = None, interval_s: float = INTERVAL_S) -> None:
        super().__init__(out)
        self._err, self._interval_s = err, interval_s
        self._view = resumed(view or RunView())
        self._next_s, self._shown_step = -math.inf, self._view.step

    def on_events(self, events: Sequence[kinds.Event]) -> None:
        for event in events:
            self._view = take(self._view, event)
            if isinstance(event, kinds.OutputLine):
                _write(self._err if event.stream == "stderr" else self._out, printed_line(event))
            elif isinstance(event, kinds.RunEnded):
                for line in run_summary(self._view):
                    self.status(line, event.time)
            elif not isinstance(event, ROUTINE) and (text := describe(event)):
                self.status(text, event.time)

    def tick(self, now: float) -> None:
        """Writes a line of progress if one is due and a step was finished. `now` in Unix seconds."""
        if now >= self._next_s and self._view.step != self._shown_step and not self._view.ended:
            self.status(run_progress(self._view, since=self._shown_step), now)
            self._next_s, self._shown_step = now + self._interval_s, self._view.step


class PlainSweepViewer(_Lines):
    """Writes the lines of a sweep; the arguments are those of `PlainViewer`."""

    def __init__(self, out: TextIO, interval_s: float = INTERVAL_S) -> None:
        super().__init__(out)
        self._interval_s = interval_s
        self._view: SweepView | None = None
        self._now, self._next_s, self._last_progress = 0.0, 0.0, ""

    def show(self, view: SweepView, now: float) -> None:
        """Writes what has changed, and a line of progress if one is due. `now` in Unix seconds."""
        view = tidy(view)
        if self._view is None:
            self.status(opening(view), now)
            self._next_s = now + self._interval_s
        for line in changes(self._view or _as_found(view), view):
            self.status(line, now)
        self._view, self._now = view, now
        line = sweep_progress(view)
        if now >= self._next_s and line != self._last_progress and not view.outcome:
            self.status(line, now)
            self._next_s, self._last_progress = now + self._interval_s, line

    def close(self) -> None:
        """Writes the summary if the sweep has ended."""
        for line in sweep_summary(self._view, self._now) if self._view else []:
            self.status(line, self._now)
        super().close()


def run_progress(view: RunView, since: int = 0) -> str:
    """'step 412/460  epoch 18/20  loss 0.0851  lr 0.00267  1,234 rows/s  2 workers  2.4 s left  saved step 391'.

    Args:
        view: of the run.
        since: evaluations and checkpoints of this step or earlier ones are left out.
    """
    num_alive = len([member for member in view.members if member.worker not in view.lost])
    parts = [
        f"step {view.step}/{view.num_steps}",
        f"epoch {view.epoch}/{view.num_epochs}",
        f"loss {format_number(view.loss)}" if view.loss is not None else "",
        f"lr {format_number(view.learning_rate)}" if view.learning_rate is not None else "",
        f"{format_count(view.rows_per_s)} rows/s" if view.rows_per_s is not None else "",
        count_of(num_alive, "worker") if num_alive else "",
        f"{format_seconds(view.left_s)} left" if view.left_s is not None else "",
        count_of(view.num_skipped, "skipped step") if view.num_skipped else "",
    ]
    if view.evaluation and view.evaluation.step > since:
        parts.append(f"{format_metrics(view.evaluation.metrics)} at step {view.evaluation.step}")
    if view.checkpoint and view.checkpoint.step > since:
        parts.append(f"saved step {view.checkpoint.step}")
    return "  ".join(part for part in parts if part)


def opening(view: SweepView) -> str:
    """'sweep digits: 20 trials, the highest valid/accuracy is best, in /home/me/runs/digits'."""
    best = "highest" if view.mode == "max" else "lowest"
    before = f"; {num_ended(view)} of them ended before" if num_ended(view) else ""
    trials = count_of(view.num_trials, "trial")
    return f"sweep {view.name}: {trials}, the {best} {view.metric} is best, in {view.directory}{before}"


def sweep_progress(view: SweepView) -> str:
    """'7 of 20 trials ended, 3 running (steps 40 to 300), best trial-0004 valid/accuracy 0.975 at step 460'."""
    steps = [trial.step for trial in view.trials if trial.state == RUNNING]
    low, high = min(steps, default=0), max(steps, default=0)
    where = f" (steps {low} to {high})" if low < high else f" (step {low})"
    best = f", best {view.best.name} {format_best(view.best, view)}" if view.best else ""
    return f"{ended_of(view)}, {len(steps)} running{where if steps else ''}{best}"


def changes(before: SweepView, after: SweepView) -> list[str]:
    """What is new in `after`, one line each: trials that start, end, get other workers, become the best."""
    past = {trial.name: trial for trial in before.trials}
    pairs = [(past.get(trial.name, TrialView(name=trial.name)), trial) for trial in after.trials]
    lines = list(itertools.chain.from_iterable(_changes(was, trial, after) for was, trial in pairs))
    best = after.best
    if best and (not before.best or before.best.name != best.name):
        lines.append(f"{best.name} is the best: {format_best(best, after)}")
    return lines


def _as_found(view: SweepView) -> SweepView:
    """A resumed sweep as if it were known before, except that no trial runs: so its history is not written again."""
    trials = [replace(trial, state=PENDING) if trial.state == RUNNING else trial for trial in view.trials]
    return replace(view, trials=tuple(trials))


def _changes(was: TrialView, trial: TrialView, view: SweepView) -> Iterator[str]:
    if was.state == trial.state:
        if trial.state == RUNNING and was.workers != trial.workers:
            yield f"{trial.name} has {_workers(trial)} instead of {was.workers or 'none'}, at step {trial.step}"
        return
    if trial.state == RUNNING or (was.state == PENDING and trial.state in ENDED):
        yield _started(was, trial)
    if trial.state == PENDING:
        yield f"{trial.name} waits for workers at step {trial.step}"
    if trial.state == FAILED:
        yield f"{trial.name} failed {failure(trial)}"
    if trial.state in ENDINGS:
        value = f": {view.metric} {format_number(trial.newest)}" if trial.newest is not None else ""
        yield f"{trial.name} {ENDINGS[trial.state]} at step {trial.step}{value}"


def _started(was: TrialView, trial: TrialView) -> str:
    workers = f" with {_workers(trial)}" if trial.workers else ""
    if was.step:
        return f"{trial.name} resumes{workers} from step {was.step}"
    values = f": {format_values(trial.values)}" if trial.values else ""
    return f"{trial.name} started{workers}{values}"


def _workers(trial: TrialView) -> str:
    return count_of(trial.workers, "worker") if trial.workers else "no worker"


def _write(stream: TextIO, line: str) -> None:
    stream.write(line + "\n")
    stream.flush()
