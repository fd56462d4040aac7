"""A sweep as whole lines, where there is no terminal: files, job logs, pipes.

One line per change, found by comparing with the view that was shown before, and one line of progress per interval; no
carriage returns, no control characters, each line flushed. Runs in the driver. What is on a terminal is `sweep_live`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TextIO

from raytrain.console.sweep_words import ENDED, failure, format_best, format_short, num_ended, summary, tidy
from raytrain.console.words import clock
from raytrain.events.sweep import COMPLETED, FAILED, PAUSED, PENDING, RUNNING, STOPPED, SweepView, TrialView
from raytrain.events.words import clean, count_of, format_number

ENDINGS = {COMPLETED: "completed", STOPPED: "stopped early", PAUSED: "paused"}


class PlainSweepViewer:
    """Writes lines.

    Args:
        out: where lines go.
        interval_s: seconds between two lines of progress, at least.
    """

    def __init__(self, out: TextIO, interval_s: float = 10.0) -> None:
        self._out, self._interval_s = out, interval_s
        self._view: SweepView | None = None
        self._now = 0.0
        self._next_s = 0.0
        self._told = ""

    def show(self, view: SweepView, now: float) -> None:
        """Writes what has changed, and a line of progress if one is due. `now` in Unix seconds."""
        view = tidy(view)
        if self._view is None:
            self._write(opening(view), now)
            self._next_s = now + self._interval_s
        for line in changes(self._view or _as_found(view), view):
            self._write(line, now)
        self._view, self._now = view, now
        line = progress_line(view)
        if now >= self._next_s and line != self._told and not view.outcome:
            self._write(line, now)
            self._next_s, self._told = now + self._interval_s, line

    def say(self, text: str, now: float) -> None:
        self._write(clean(text), now)

    def close(self) -> None:
        """Writes the summary if the sweep has ended."""
        for line in summary(self._view, self._now) if self._view else []:
            self._write(line, self._now)
        self._out.flush()

    def _write(self, line: str, now: float) -> None:
        self._out.write(f"{clock(now)} {line}\n")
        self._out.flush()


def opening(view: SweepView) -> str:
    """'sweep digits: 20 trials, the highest valid/accuracy is best, in /home/me/runs/digits'."""
    best = "highest" if view.mode == "max" else "lowest"
    before = f"; {num_ended(view)} of them ended before" if num_ended(view) else ""
    trials = count_of(view.num_trials, "trial")
    return f"sweep {view.name}: {trials}, the {best} {view.metric} is best, in {view.directory}{before}"


def changes(before: SweepView, after: SweepView) -> list[str]:
    """What is new in `after`, one line each: trials that start, end, get other workers, become the best."""
    past = {trial.name: trial for trial in before.trials}
    pairs = [(past.get(trial.name, TrialView(name=trial.name)), trial) for trial in after.trials]
    lines = list(itertools.chain.from_iterable(_changes(was, trial, after) for was, trial in pairs))
    best = after.best
    if best and (not before.best or before.best.name != best.name):
        lines.append(f"{best.name} is the best: {format_best(best, after)}")
    return lines


def progress_line(view: SweepView) -> str:
    """'7 of 20 trials ended, 3 running (steps 40 to 300), best trial-0004 valid/accuracy 0.975 at step 460'."""
    steps = [trial.step for trial in view.trials if trial.state == RUNNING]
    low, high = min(steps, default=0), max(steps, default=0)
    where = f" (steps {low} to {high})" if low < high else f" (step {low})"
    running = f"{len(steps)} running{where if steps else ''}"
    parts = [f"{num_ended(view)} of {count_of(view.num_trials, 'trial')} ended", running]
    if view.best:
        parts.append(f"best {view.best.name} {format_best(view.best, view)}")
    return ", ".join(parts)


def _as_found(view: SweepView) -> SweepView:
    """What is taken as known at first sight: all but that trials run; so a sweep that goes on does not tell its history."""
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
        return f"{trial.name} goes on{workers} from step {was.step}"
    values = f": {format_short(trial.values)}" if trial.values else ""
    return f"{trial.name} started{workers}{values}"


def _workers(trial: TrialView) -> str:
    return count_of(trial.workers, "worker") if trial.workers else "no worker"


if __name__ == "__main__":
    import sys

    from raytrain.console.sweep_demo import demo_views

    viewer = PlainSweepViewer(sys.stdout)
    for now, view in demo_views():
        viewer.show(view, now)
    viewer.close()
