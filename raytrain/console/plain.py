"""A run as whole lines, where there is no terminal: files, job logs, pipes.

One line of progress per interval, with the newest evaluation and checkpoint, and one per event that is no routine; no
carriage returns, no control characters, each line flushed. Runs in the driver. What is on a terminal is `live`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TextIO

from raytrain.console.words import ROUTINE, begun_again, clock, printed_line, summary, take
from raytrain.events import kinds
from raytrain.events.view import RunView
from raytrain.events.words import count_of, describe, format_metrics, format_number
from raytrain.units import format_count, format_seconds


class PlainViewer:
    """Writes lines.

    Args:
        out: where lines go.
        err: where lines go that the task wrote to stderr.
        view: what was known of the run before.
        interval_s: seconds between two lines of progress, at least.
    """

    def __init__(self, out: TextIO, err: TextIO, view: RunView | None = None, interval_s: float = 10.0) -> None:
        self._out, self._err, self._interval_s = out, err, interval_s
        self._view = begun_again(view or RunView())
        self._next_s = -math.inf
        self._shown_step = self._view.step

    def on_events(self, events: Sequence[kinds.Event]) -> None:
        for event in events:
            self._view = take(self._view, event)
            if isinstance(event, kinds.Printed):
                _write(self._err if event.stream == "stderr" else self._out, printed_line(event))
            elif isinstance(event, kinds.RunEnded):
                self._end(event.time)
            elif not isinstance(event, ROUTINE) and (text := describe(event)):
                _write(self._out, f"{clock(event.time)} {text}")

    def tick(self, now: float) -> None:
        """A line of progress if one is due and a step was finished. `now` in Unix seconds."""
        if now >= self._next_s and self._view.step != self._shown_step and not self._view.ended:
            self._progress(now)

    def say(self, text: str, now: float) -> None:
        _write(self._out, f"{clock(now)} {text}")

    def close(self) -> None:
        self._out.flush()

    def _progress(self, now: float) -> None:
        line = progress_line(self._view, since=self._shown_step)
        self._next_s, self._shown_step = now + self._interval_s, self._view.step
        _write(self._out, f"{clock(now)} {line}")

    def _end(self, now: float) -> None:
        for line in summary(self._view):
            _write(self._out, f"{clock(now)} {line}")


def progress_line(view: RunView, since: int = 0) -> str:
    """'step 412/460  epoch 18/20  loss 0.0851  lr 0.00267  1,234 rows/s  2 workers  2.4 s left  saved step 391'.

    Args:
        view: what is known of the run.
        since: evaluations and checkpoints are told if they are of later steps than this one.
    """
    living = len([member for member in view.members if member.worker not in view.lost])
    parts = [
        f"step {view.step}/{view.num_steps}",
        f"epoch {view.epoch}/{view.num_epochs}",
        f"loss {format_number(view.loss)}" if view.loss is not None else "",
        f"lr {format_number(view.learning_rate)}" if view.learning_rate is not None else "",
        f"{format_count(view.rows_per_s)} rows/s" if view.rows_per_s is not None else "",
        count_of(living, "worker") if living else "",
        f"{format_seconds(view.left_s)} left" if view.left_s is not None else "",
        count_of(view.num_skipped, "skipped step") if view.num_skipped else "",
    ]
    if view.evaluation and view.evaluation.step > since:
        parts.append(f"{format_metrics(view.evaluation.metrics)} at step {view.evaluation.step}")
    if view.checkpoint and view.checkpoint.step > since:
        parts.append(f"saved step {view.checkpoint.step}")
    return "  ".join(part for part in parts if part)


def _write(stream: TextIO, line: str) -> None:
    stream.write(line + "\n")
    stream.flush()


if __name__ == "__main__":
    import sys

    from raytrain.console.demo import demo_events

    viewer = PlainViewer(sys.stdout, sys.stderr)
    for event in demo_events(460, ended=True):
        viewer.on_events([event])
        viewer.tick(event.time)
    viewer.close()
