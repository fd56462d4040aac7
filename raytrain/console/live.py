"""A run or a sweep on a terminal: one frame that is drawn again and again, above it what the task prints.

`run_frame` and `sweep_frame` make a value of a view, which fits 80 columns by 24 lines; the viewers draw it. `table` decides
which trials of a sweep and which columns are shown. Runs in the driver.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raytrain.console.messages import (
    ENDED,
    clock,
    count_states,
    ended_of,
    failure,
    format_best,
    format_counts,
    format_values,
    printed_line,
    resumed,
    run_summary,
    sweep_summary,
    take,
    tidy,
    where_time_went,
    with_note,
)
from raytrain.console.table import sparkline, trial_table
from raytrain.events import kinds
from raytrain.events.goodput import Ledger
from raytrain.events.messages import clean, count_of, format_logical, format_number
from raytrain.events.sweep import FAILED, SweepView
from raytrain.events.view import RunView
from raytrain.units import format_bytes, format_count, format_seconds

MAX_WIDTH, MAX_SWEEP_WIDTH = 100, 140
MAX_WORKERS = 5
MAX_NOTES = 5
MAX_TRIALS, LEAST_TRIALS = 14, 4
OTHER_LINES = 10
"""Lines of a terminal that are not trials."""
SWEEP_INTERVAL_S = 0.25
COLORS = {"training": "green", "running": "green", "completed": "green", "failed": "red", "stopped": "yellow"}


class _Screen:
    """Draws frames on a terminal, and prints lines above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def _draw(self, frame: RenderableType) -> None:
        self._live.update(frame)
        self._live.start()
        self._live.refresh()

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def _end(self, last_frame: RenderableType | None, summary: Sequence[str]) -> None:
        """Leaves the last frame on the screen, and the summary below it."""
        self._live.transient = False
        if last_frame is not None:
            self._draw(last_frame)
        self._live.stop()
        for line in summary:
            self._print(line)


class LiveViewer(_Screen):
    """Draws the frame of a run on `tick`.

    Args:
        console: the terminal.
        err: where lines go that the task wrote to stderr, if that is not the terminal.
        view: of a run that is resumed.
    """

    def __init__(self, console: Console, err: TextIO, view: RunView | None = None) -> None:
        super().__init__(console)
        self._err, self._view = err, resumed(view or RunView())

    def on_events(self, events: Sequence[kinds.Event]) -> None:
        for event in events:
            self._view = take(self._view, event)
            if not isinstance(event, kinds.OutputLine):
                continue
            if event.stream == "stderr" and not self._err.isatty():
                self._err.write(printed_line(event) + "\n")
                self._err.flush()
            else:
                self._print(printed_line(event))

    def tick(self, now: float) -> None:
        """Draws the frame as of `now`, Unix seconds."""
        if not self._view.ended:
            self._draw(run_frame(self._view, self._console.width, now))

    def status(self, text: str, now: float) -> None:
        """Draws the text as the newest note."""
        self._view = with_note(self._view, text, now)
        self.tick(now)

    def close(self) -> None:
        """Leaves the last frame on the screen, and the summary below it if the run has ended."""
        end = self._view.ended.time if self._view.ended else None
        frame = run_frame(self._view, self._console.width, end) if self._live.is_started else None
        self._end(frame, run_summary(self._view))


class LiveSweepViewer(_Screen):
    """Draws the frame of a sweep on `show`."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._view: SweepView | None = None
        self._now, self._drawn_s = 0.0, -math.inf

    def show(self, view: SweepView, now: float) -> None:
        """Draws the frame as of `now`, Unix seconds, unless the last one is younger than a quarter of a second."""
        self._view, self._now = view, now
        if now - self._drawn_s >= SWEEP_INTERVAL_S:
            self._draw(self._frame(view))
            self._drawn_s = now

    def status(self, text: str, now: float) -> None:
        """Leaves the text above the frame."""
        self._print(f"{clock(now)} {clean(text)}")

    def close(self) -> None:
        """Leaves the last frame on the screen, and the summary below it if the sweep has ended."""
        if self._view is None:
            self._end(None, [])
        else:
            self._end(self._frame(self._view), sweep_summary(tidy(self._view), self._now))

    def _frame(self, view: SweepView) -> RenderableType:
        max_trials = max(LEAST_TRIALS, self._console.height - OTHER_LINES)
        return sweep_frame(view, self._console.width, self._now, max_trials)


def run_frame(view: RunView, width: int, now: float | None = None) -> RenderableType:
    """The frame of a run, at most 23 lines.

    Args:
        view: of the run.
        width: of the terminal, in columns.
        now: Unix time in seconds, up to which time is counted; None: up to the last event, and the header leaves it out.
    """
    width, run = min(width, MAX_WIDTH), view.run
    took_s = now - run.time if now is not None and run else None
    parts = [_header(width, run.name if run else "raytrain", view.state, took_s, run.directory if run else "")]
    if run:
        left = f"{format_seconds(view.left_s):>12} left" if view.left_s is not None and not view.ended else ""
        text = f"step {view.step}/{view.num_steps}  epoch {view.epoch}/{view.num_epochs}{left}"
        parts += [_progress(width, view.step, view.num_steps, text), Text(), _run_numbers(view, width, now)]
    if view.members or view.starting:
        parts += [Text(), _workers(view, width)]
    if view.notes:
        parts += [Text(), *_notes(view, width)]
    return Group(*parts)


def sweep_frame(view: SweepView, width: int, now: float | None, max_trials: int = MAX_TRIALS) -> RenderableType:
    """The frame of a sweep, at most 9 lines more than `max_trials`.

    Args:
        view: of the sweep.
        width: of the terminal, in columns.
        now: Unix time in seconds; None: the header leaves out the time.
        max_trials: lines of the table below its titles, at most.
    """
    view, width = tidy(view), min(width, MAX_SWEEP_WIDTH)
    took_s = now - view.started if now is not None else None
    done = sum(1.0 if t.state in ENDED else t.step / max(1, t.step, t.num_steps) for t in view.trials if t.num_steps)
    parts = [
        _header(width, view.name, view.outcome or "running", took_s, view.directory),
        _progress(width, done, view.num_trials, ended_of(view)),
        *(Text(), _sweep_numbers(view, width)),
    ]
    return Group(*parts, *((Text(), trial_table(view, width, max_trials)) if view.trials else ()))


def _header(width: int, name: str, state: str, took_s: float | None, directory: str) -> RenderableType:
    grid = _grid(width)
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True, overflow="ellipsis", ratio=1)
    title = Text.assemble((name, "bold"), (f"  {state}", COLORS.get(state, "yellow")))
    if took_s is not None:
        title.append(f"  {format_seconds(max(0.0, took_s))}", style="dim")
    grid.add_row(title, Text(f"  {directory}", style="dim"))
    return grid


def _progress(width: int, done: float, total: int, text: str) -> RenderableType:
    grid = _grid(width)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    bar = ProgressBar(total=max(1, total), completed=done, complete_style="cyan", finished_style="green")
    grid.add_row(bar, f"  {text}")
    return grid


def _run_numbers(view: RunView, width: int, now: float | None) -> RenderableType:
    grid = _grid(width)
    grid.add_column(style="dim", width=9, no_wrap=True)
    grid.add_column(width=10, no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    losses = sparkline([loss for _, loss in view.history], width - 22)
    grid.add_row("loss", _number(view.loss), Text(losses, style="cyan"))
    rate = Text.assemble(("learning rate  ", "dim"), _number(view.learning_rate))
    grid.add_row("rows/s", format_count(view.rows_per_s) if view.rows_per_s is not None else "-", rate)
    for name, done in (("last", view.evaluation), ("best", view.best)):
        if done:
            metrics = Text("  ").join(
                Text.assemble((f"{metric} ", "dim"), format_number(value)) for metric, value in done.metrics.items()
            )
            grid.add_row(name, f"step {done.step}", metrics)
    if view.checkpoint:
        size = f"{format_bytes(view.checkpoint.size_bytes)}, pause {format_seconds(view.checkpoint.stall_s)}"
        grid.add_row("saved", f"step {view.checkpoint.step}", size)
    if view.num_skipped:
        grid.add_row("skipped", count_of(view.num_skipped, "step"), "of which the loss or the gradient was not finite")
    _add_goodput(grid, view.goodput.at(now), width - 19)
    return grid


def _add_goodput(grid: Table, ledger: Ledger, room: int) -> None:
    """A row with the classes that fit in `room` columns, the longest first."""
    classes = where_time_went(ledger)
    ends = itertools.accumulate(len(f"{title} {time}  ") for title, time in classes)
    fitting = [one for one, end in zip(classes, ends, strict=True) if end - 2 <= room]
    if classes:
        times = Text("  ").join(Text.assemble((f"{title} ", "dim"), time) for title, time in fitting)
        grid.add_row("goodput", f"{100 * ledger.goodput:.1f} %", times)


def _workers(view: RunView, width: int) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, width=width, header_style="dim")
    for title in ("rank", "worker", "node", "process"):
        table.add_column(title, no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column("logical workers", ratio=1, no_wrap=True, overflow="ellipsis")
    rows = [_member(member, view) for member in sorted(view.members, key=lambda member: member.rank)]
    rows += [("-", new.worker, new.node, str(new.pid), Text("starting", style="yellow")) for new in view.starting]
    shown = rows if len(rows) <= MAX_WORKERS else rows[: MAX_WORKERS - 1]
    for row in shown:
        table.add_row(*row)
    if len(shown) < len(rows):
        table.add_row("", Text(f"and {len(rows) - len(shown)} more", style="dim"))
    return table


def _member(member: kinds.Member, view: RunView) -> tuple[str, str, str, str, Text]:
    held = Text(format_logical(member.logical))
    if member.worker in view.lost:
        held = Text("lost", style="red")
    return str(member.rank), member.worker, member.node, str(member.pid), held


def _notes(view: RunView, width: int) -> list[RenderableType]:
    lines = []
    for note in view.notes[-MAX_NOTES:]:
        line = Text.assemble((clock(note.time), "dim"), "  ", note.text, no_wrap=True, overflow="ellipsis")
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return [*lines]


def _number(value: float | None) -> str:
    return format_number(value) if value is not None else "-"


def _sweep_numbers(view: SweepView, width: int) -> RenderableType:
    grid = _grid(width)
    grid.add_column(style="dim", width=8, no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_row("trials", Text(format_counts(count_states(view))))
    if best := view.best:
        values = Text(format_values(best.values), style="dim")
        grid.add_row("best", Text.assemble((best.name, "bold"), f"  {format_best(best, view)}  ", values))
    failed = [trial for trial in view.trials if trial.state == FAILED]
    if failed:
        grid.add_row("failed", Text(f"{failed[-1].name} {failure(failed[-1])}", style="red"))
    return grid


def _grid(width: int) -> Table:
    return Table(box=None, show_header=False, padding=0, width=max(1, width))
