"""The trials of a sweep as one table: which of them are shown, and which columns fit.

`chosen` and `fitting` decide, `trial_table` draws; all are pure. Widths are in columns of the terminal. Runs in the driver.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.console.messages import count_states, format_counts, short_value
from raytrain.events.messages import format_number
from raytrain.events.sweep import FAILED, PAUSED, PENDING, RUNNING, STOPPED, SweepView, TrialView

GAP = 2
MAX_NAME, MAX_VALUE = 24, 14
NUMBER = 9  # as wide as '1.235e-05'
LEAST_TREND, MOST_TREND = 6, 24
BLOCKS = "▁▂▃▄▅▆▇█"
COLORS = {RUNNING: "green", FAILED: "red", PAUSED: "yellow", PENDING: "dim", STOPPED: "yellow"}


@dataclass(frozen=True)
class Column:
    """A title and one cell per row that is shown."""

    title: str
    cells: tuple[Text, ...]
    max_width: int = MAX_NAME

    @property
    def width(self) -> int:
        """What it takes to show all of it, but for what is too long."""
        return min(self.max_width, max([cell_len(self.title), *(cell.cell_len for cell in self.cells)]))


def chosen(view: SweepView, max_rows: int) -> list[TrialView]:
    """The trials to show, in the order of their making: the best one, then those that run, then those with the best values.

    Args:
        view: the sweep.
        max_rows: lines of the table; one of them is kept for what is left out, if something is.
    """
    if max(len(view.trials), view.num_trials) <= max_rows:
        return list(view.trials)
    best = view.best
    ranked = sorted(view.trials, key=lambda trial: (trial is not best, trial.state != RUNNING, _rank(trial, view.mode)))
    kept = {trial.name for trial in ranked[: max(0, max_rows - 1)]}
    return [trial for trial in view.trials if trial.name in kept]


def fitting(columns: Sequence[Column], room: int) -> list[Column]:
    """As many of the columns, from the first on, as fit in `room`, each with the gap beside it."""
    ends = itertools.accumulate(column.width + GAP for column in columns)
    return [column for column, end in zip(columns, ends, strict=True) if end <= room]


def trial_table(view: SweepView, width: int, max_rows: int) -> RenderableType:
    """The table, and below it lines that say which trials and which hyperparameters it leaves out.

    Args:
        view: the sweep, without control characters.
        width: of the terminal.
        max_rows: lines below the titles, at most; one more where hyperparameters are left out.
    """
    trials, best = chosen(view, max_rows), view.best
    first = [
        Column("trial", tuple(_name(trial, trial is best) for trial in trials)),
        Column("state", tuple(Text(trial.state, style=COLORS.get(trial.state, "")) for trial in trials)),
    ]
    workers = Column("workers", tuple(Text(str(trial.workers or "-")) for trial in trials))
    step = Column("step", tuple(Text(_step(trial)) for trial in trials))
    room = width - _least_metric(view) - sum(column.width + GAP for column in (*first, workers, step))
    searched = _hyperparameters(view, trials)
    shown = fitting(searched, room)
    columns = [*first, *shown, *([workers] if room >= 0 else []), step]
    rest = width - sum(column.width + GAP for column in columns)
    table = _drawn([*columns, _metric(view, trials, rest)], width)
    hidden = ", ".join(column.title for column in searched[len(shown) :])
    lines = [_left_out(view, trials), f"not shown: {hidden}" if hidden else ""]
    return Group(table, *(_remark(line, width) for line in lines if line))


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


def _remark(line: str, width: int) -> Text:
    text = Text(line, style="dim", no_wrap=True, overflow="ellipsis")
    text.truncate(width, overflow="ellipsis")
    return text


def _drawn(columns: Sequence[Column], width: int) -> Table:
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, width=width, header_style="dim")
    for column in columns[:-1]:
        table.add_column(Text(column.title), no_wrap=True, overflow="ellipsis", max_width=column.max_width)
    table.add_column(Text(columns[-1].title), no_wrap=True, overflow="ellipsis", ratio=1)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table


def _rank(trial: TrialView, mode: str) -> tuple[bool, float]:
    """Lower is better; those without a value come last."""
    point = trial.best(mode)
    return (point is None, (point[1] if mode == "min" else -point[1]) if point else 0.0)


def _left_out(view: SweepView, trials: Sequence[TrialView]) -> str:
    """'and 17 more: 5 pending, 12 stopped'; empty if there are none."""
    found = count_states(view, without={trial.name for trial in trials})
    return f"and {sum(found.values())} more: {format_counts(found)}" if found else ""


def _name(trial: TrialView, is_best: bool) -> Text:
    """'0004 *' of trial-0004: the title says the rest."""
    number = trial.name.removeprefix("trial-")
    return Text(f"{number} *", style="bold") if is_best else Text(number)


def _step(trial: TrialView) -> str:
    return f"{trial.step}/{trial.num_steps}" if trial.num_steps else str(trial.step)


def _hyperparameters(view: SweepView, trials: Sequence[TrialView]) -> list[Column]:
    """One column per hyperparameter of any trial; those that are the same in all trials come last."""
    names = list(dict.fromkeys(name for trial in view.trials for name in trial.values))
    num_values = {name: len({str(trial.values.get(name)) for trial in view.trials}) for name in names}
    titles = {name: short if (short := name.removeprefix("run.")) not in names else name for name in names}
    return [
        Column(titles[name], tuple(Text(_value(trial, name)) for trial in trials), MAX_VALUE)
        for name in sorted(names, key=lambda name: num_values[name] == 1)
    ]


def _value(trial: TrialView, name: str) -> str:
    return short_value(trial.values[name]) if name in trial.values else "-"


def _least_metric(view: SweepView) -> int:
    """How wide the column of the metric is at least."""
    return max(NUMBER + 1 + LEAST_TREND, min(MAX_NAME, cell_len(view.metric)))


def _metric(view: SweepView, trials: Sequence[TrialView], width: int) -> Column:
    """The newest value of each trial, and the trend of those before it."""
    trend = min(MOST_TREND, width - NUMBER - 1)
    cells = []
    for trial in trials:
        number = "-" if trial.newest is None else format_number(trial.newest)
        blocks = sparkline([value for _, value in trial.curve], trend)
        cells.append(Text.assemble(f"{number:<{NUMBER}} ", (blocks, "cyan")))
    return Column(view.metric, tuple(cells), width)
