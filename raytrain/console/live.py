"""A run on a terminal: one frame that is drawn again and again, above it what the task prints.

`render` makes a value of a value and fits 80 columns by 24 lines; `LiveViewer` draws it. Runs in the driver.
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

from raytrain.console.words import begun_again, clock, printed_line, summary, take, where_time_went, with_note
from raytrain.events import kinds
from raytrain.events.ledger import Ledger
from raytrain.events.view import RunView
from raytrain.events.words import count_of, format_logical, format_number
from raytrain.units import format_bytes, format_count, format_seconds

MAX_WIDTH = 100
MAX_WORKERS = 5
MAX_NOTES = 5
BLOCKS = "▁▂▃▄▅▆▇█"
COLORS = {"training": "green", "completed": "green", "failed": "red", "stopped": "yellow"}


class LiveViewer:
    """Draws the frame on `tick`.

    Args:
        console: the terminal.
        err: where lines go that the task wrote to stderr, if that is not the terminal.
        view: what was known of the run before.
    """

    def __init__(self, console: Console, err: TextIO, view: RunView | None = None) -> None:
        self._console, self._err = console, err
        self._view = begun_again(view or RunView())
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def on_events(self, events: Sequence[kinds.Event]) -> None:
        for event in events:
            self._view = take(self._view, event)
            if isinstance(event, kinds.Printed):
                self._print(event)

    def tick(self, now: float) -> None:
        """Draws the frame as of `now`, Unix seconds."""
        if not self._view.ended:
            self._live.update(render(self._view, self._console.width, now))
            self._live.start()
            self._live.refresh()

    def say(self, text: str, now: float) -> None:
        """Draws the text as the newest note."""
        self._view = with_note(self._view, text, now)
        self.tick(now)

    def close(self) -> None:
        """Leaves the last frame on the screen, and the summary below it if the run has ended."""
        self._live.transient = False
        if self._live.is_started:
            end = self._view.ended.time if self._view.ended else None
            self._live.update(render(self._view, self._console.width, end), refresh=True)
        self._live.stop()
        for line in summary(self._view):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _print(self, event: kinds.Printed) -> None:
        if event.stream == "stderr" and not self._err.isatty():
            self._err.write(printed_line(event) + "\n")
            self._err.flush()
        else:
            self._console.print(printed_line(event), markup=False, highlight=False, soft_wrap=True)


def render(view: RunView, width: int, now: float | None = None) -> RenderableType:
    """The frame, at most 23 lines.

    Args:
        view: what is known of the run.
        width: of the terminal, in columns.
        now: Unix time in seconds, up to which time is counted; None: up to the last event, and the header leaves it out.
    """
    width = min(width, MAX_WIDTH)
    parts = [_header(view, width, now)]
    if view.run:
        parts += [_progress(view, width), Text(), _numbers(view, width, now)]
    if view.members or view.starting:
        parts += [Text(), _workers(view, width)]
    if view.notes:
        parts += [Text(), *_notes(view, width)]
    return Group(*parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as at most `width` blocks, each the mean of its share; those that are not finite leave a gap."""
    count = max(0, min(len(values), width))
    ends = [i * len(values) // count for i in range(count + 1)] if count else []
    means = [sum(values[i:j]) / (j - i) for i, j in itertools.pairwise(ends)]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] if math.isfinite(mean) else " " for mean in means)


def _header(view: RunView, width: int, now: float | None) -> RenderableType:
    grid = _grid(width)
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True, overflow="ellipsis", ratio=1)
    name = Text(view.run.name if view.run else "raytrain", style="bold")
    name.append(f"  {view.state}", style=COLORS.get(view.state, "yellow"))
    if now is not None and view.run:
        name.append(f"  {format_seconds(max(0.0, now - view.run.time))}", style="dim")
    grid.add_row(name, Text(view.run.directory if view.run else "", style="dim"))
    return grid


def _progress(view: RunView, width: int) -> RenderableType:
    grid = _grid(width)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    left = f"{format_seconds(view.left_s):>12} left" if view.left_s is not None and not view.ended else ""
    text = f"  step {view.step}/{view.num_steps}  epoch {view.epoch}/{view.num_epochs}{left}"
    bar = ProgressBar(total=max(1, view.num_steps), completed=view.step, complete_style="cyan", finished_style="green")
    grid.add_row(bar, text)
    return grid


def _numbers(view: RunView, width: int, now: float | None) -> RenderableType:
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
    _add_goodput(grid, view.books.at(now), width - 19)
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


def _grid(width: int) -> Table:
    return Table.grid(expand=True) if width <= 0 else Table(box=None, show_header=False, padding=0, width=width)


if __name__ == "__main__":
    import sys
    import time

    from raytrain.console.demo import demo_events

    viewer = LiveViewer(Console(), sys.stderr)
    for event in demo_events(460, ended=True):
        viewer.on_events([event])
        viewer.tick(event.time)
        time.sleep(0.02)
    viewer.close()
