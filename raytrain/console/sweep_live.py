"""A sweep on a terminal: one frame with a table of all trials, drawn again and again, above it what the driver says.

`render` makes a value of a value and fits 80 columns by 24 lines; `LiveSweepViewer` draws it. What stands in the table is
decided in `sweep_table`. Runs in the driver.
"""

from __future__ import annotations

import math

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raytrain.console.sweep_table import trial_table
from raytrain.console.sweep_words import (
    ENDED,
    counts,
    failure,
    format_best,
    format_counts,
    format_short,
    num_ended,
    summary,
    tidy,
)
from raytrain.console.words import clock
from raytrain.events.sweep import FAILED, SweepView
from raytrain.events.words import clean, count_of
from raytrain.units import format_seconds

MAX_WIDTH = 140
MAX_ROWS, LEAST_ROWS = 14, 4
OTHER_LINES = 10
"""Lines of a terminal that are not rows of the table."""

INTERVAL_S = 0.25
COLORS = {"running": "green", "completed": "green", "stopped": "yellow"}


class LiveSweepViewer:
    """Draws the frame.

    Args:
        console: the terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._view: SweepView | None = None
        self._now, self._drawn_s = 0.0, -math.inf
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def show(self, view: SweepView, now: float) -> None:
        """Draws the frame as of `now`, Unix seconds, unless the last one is younger than a quarter of a second."""
        self._view, self._now = view, now
        if now - self._drawn_s >= INTERVAL_S:
            self._draw(view)
            self._drawn_s = now

    def say(self, text: str, now: float) -> None:
        """Leaves the text above the frame."""
        self._print(f"{clock(now)} {clean(text)}")

    def close(self) -> None:
        """Leaves the last frame on the screen, and the summary below it if the sweep has ended."""
        self._live.transient = False
        if self._view:
            self._draw(self._view)
        self._live.stop()
        for line in summary(tidy(self._view), self._now) if self._view else []:
            self._print(line)

    def _draw(self, view: SweepView) -> None:
        max_rows = max(LEAST_ROWS, self._console.height - OTHER_LINES)
        self._live.update(render(view, self._console.width, self._now, max_rows))
        self._live.start()
        self._live.refresh()

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


def render(view: SweepView, width: int, now: float | None, max_rows: int = MAX_ROWS) -> RenderableType:
    """The frame, at most 9 lines more than `max_rows`.

    Args:
        view: what is known of the sweep.
        width: of the terminal, in columns.
        now: Unix time in seconds; None: the header leaves out how long it takes.
        max_rows: lines of the table below its titles, at most.
    """
    view, width = tidy(view), min(width, MAX_WIDTH)
    parts = [_header(view, width, now), _progress(view, width), Text(), _numbers(view, width)]
    if view.trials:
        parts += [Text(), trial_table(view, width, max_rows)]
    return Group(*parts)


def _header(view: SweepView, width: int, now: float | None) -> RenderableType:
    grid = _grid(width)
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True, overflow="ellipsis", ratio=1)
    state = view.outcome or "running"
    name = Text.assemble((view.name, "bold"), (f"  {state}", COLORS.get(state, "yellow")))
    if now is not None:
        name.append(f"  {format_seconds(max(0.0, now - view.started))}", style="dim")
    grid.add_row(name, Text(f"  {view.directory}", style="dim"))
    return grid


def _progress(view: SweepView, width: int) -> RenderableType:
    grid = _grid(width)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    done = sum(1.0 if t.state in ENDED else t.step / max(1, t.step, t.num_steps) for t in view.trials if t.num_steps)
    bar = ProgressBar(total=max(1, view.num_trials), completed=done, complete_style="cyan", finished_style="green")
    grid.add_row(bar, f"  {num_ended(view)} of {count_of(view.num_trials, 'trial')} ended")
    return grid


def _numbers(view: SweepView, width: int) -> RenderableType:
    grid = _grid(width)
    grid.add_column(style="dim", width=8, no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_row("trials", Text(format_counts(counts(view))))
    if best := view.best:
        values = Text(format_short(best.values), style="dim")
        grid.add_row("best", Text.assemble((best.name, "bold"), f"  {format_best(best, view)}  ", values))
    failed = [trial for trial in view.trials if trial.state == FAILED]
    if failed:
        grid.add_row("failed", Text(f"{failed[-1].name} {failure(failed[-1])}", style="red"))
    return grid


def _grid(width: int) -> Table:
    return Table(box=None, show_header=False, padding=0, width=max(1, width))


if __name__ == "__main__":
    import time

    from raytrain.console.sweep_demo import demo_views

    viewer = LiveSweepViewer(Console())
    for now, view in demo_views():
        viewer.show(view, now)
        time.sleep(0.05)
    viewer.close()
