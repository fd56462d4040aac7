"""The table shows what matters of many trials, and columns that fit."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from raytrain.console.table import BLOCKS, Column, chosen, fitting, sparkline, trial_table
from raytrain.events.sweep import SweepView, TrialView


def trial(number: int, state: str = "stopped", value: float | None = None, **values: Any) -> TrialView:
    curve = ((10, value),) if value is not None else ()
    return TrialView(name=f"trial-{number:04d}", state=state, curve=curve, values=values)


def sweep(*trials: TrialView, num_trials: int = 0, mode: str = "max") -> SweepView:
    num_trials = num_trials or len(trials)
    return SweepView(name="s", directory="/s", metric="acc", mode=mode, num_trials=num_trials, trials=trials)


def table_of(view: SweepView, width: int = 80, max_rows: int = 10) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=24, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(trial_table(view, width, max_rows))
    return [line.rstrip() for line in capture.get().splitlines()]


def numbers(trials: list[TrialView]) -> list[int]:
    return [int(one.name[-4:]) for one in trials]


def test_all_trials_are_shown_if_they_fit() -> None:
    view = sweep(*(trial(i) for i in range(5)))
    assert numbers(chosen(view, 5)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("mode", "numbers_shown"), [("max", [2, 4, 6]), ("min", [0, 4, 6])])
def test_of_many_trials_the_best_and_the_running_ones_are_shown_in_order(mode: str, numbers_shown: list[int]) -> None:
    view = sweep(
        trial(0, value=0.1),
        trial(1),
        trial(2, value=0.9),
        trial(3, value=0.5),
        trial(4, "running"),
        trial(5, "failed"),
        trial(6, "running", 0.4),
        trial(7, "pending"),
        mode=mode,
    )
    assert numbers(chosen(view, 4)) == numbers_shown


def test_where_more_run_than_fit_the_best_of_them_are_shown_beside_the_best_of_all() -> None:
    running = [trial(i, "running", i / 100) for i in range(30)]
    assert numbers(chosen(sweep(*running, trial(30, value=0.9)), 5)) == [27, 28, 29, 30]


def test_one_line_counts_the_trials_that_are_left_out() -> None:
    view = sweep(*(trial(i, value=i / 9) for i in range(9)), num_trials=12)
    lines = table_of(view, max_rows=4)
    assert [line[:4] for line in lines] == ["tria", "0006", "0007", "0008", "and "]
    assert lines[-1] == "and 9 more: 3 pending, 6 stopped"


def test_the_best_trial_is_marked() -> None:
    lines = table_of(sweep(trial(0, value=0.1), trial(1, value=0.9), trial(2)))
    assert [line[:6] for line in lines[1:]] == ["0000  ", "0001 *", "0002  "]


def column(title: str, width: int) -> Column:
    return Column(title, (Text("x" * width),))


def test_columns_are_kept_from_the_first_on_as_far_as_they_fit() -> None:
    columns = [column("a", 4), column("b", 6), column("c", 1)]
    shown = [[one.title for one in fitting(columns, room)] for room in (17, 16, 14, 13, 6, 5, -9)]
    assert shown == [["a", "b", "c"], ["a", "b"], ["a", "b"], ["a"], ["a"], [], []]


def test_hyperparameters_that_differ_come_first_and_those_that_do_not_fit_are_named() -> None:
    values = {"act": "relu", "a_long_name_of_a_constant": 1}
    view = sweep(*(trial(i, lr=10.0**-i, hidden=i, **values) for i in range(3)))
    wide, narrow = table_of(view, 120), table_of(view, 70)
    assert wide[0].split() == ["trial", "state", "lr", "hidden", "act", "a_long_name_o…", "workers", "step", "acc"]
    assert narrow[0].split() == ["trial", "state", "lr", "hidden", "act", "workers", "step", "acc"]
    assert narrow[-1] == "not shown: a_long_name_of_a_constant"


def test_settings_of_the_run_lose_their_prefix_unless_a_field_has_the_same_name() -> None:
    one = TrialView(name="trial-0000", values={"run.global_batch": 64, "run.seed": 1, "seed": 2})
    assert table_of(sweep(one))[0].split()[2:5] == ["global_batch", "run.seed", "seed"]


def test_a_value_that_only_some_trials_have_leaves_a_dash_in_the_others() -> None:
    lines = table_of(sweep(trial(0, lr=0.5), trial(1, momentum=0.9)))
    assert [line.split()[2:4] for line in lines] == [["lr", "momentum"], ["0.5", "-"], ["-", "0.9"]]


def test_a_trial_of_unknown_length_shows_its_step_alone() -> None:
    lines = table_of(sweep(TrialView(name="trial-0000", step=12), TrialView(name="trial-0001", step=12, num_steps=460)))
    assert [line.split()[3] for line in lines[1:]] == ["12", "12/460"]


def test_a_sparkline_goes_from_the_lowest_to_the_highest_block() -> None:
    assert sparkline(range(8), 80) == BLOCKS
    assert sparkline(range(800), 8) == BLOCKS
    assert sparkline([1.0, math.nan, 3.0, math.inf], 10) == "▁ █ "
    assert sparkline([2.0, 2.0], 10) == "▁▁"
    assert sparkline([], 10) == sparkline([1.0], 0) == sparkline([math.nan], 5) == ""
