"""The outcome of a sweep: the best trial over its whole history with its checkpoint, and a table of all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from raytrain.checkpoint.store import CheckpointStore
from raytrain.events.sweep import COMPLETED, FAILED, STOPPED, SweepView, TrialView
from raytrain.rundir import RunDir
from raytrain.tune.outcome import SweepResult, best_trial

METRIC = "valid/loss"
TRIALS = (
    TrialView(name="trial-0000", state=COMPLETED, values={"lr": 0.1}, step=30, curve=((10, 0.4), (20, 0.2), (30, 0.3))),
    TrialView(name="trial-0001", state=STOPPED, values={"lr": 0.2}, step=10, curve=((10, math.nan),)),
    TrialView(name="trial-0002", state=FAILED, values={"lr": 9.0}, message="ValueError: too fast"),
)


def view_of(*trials: TrialView, mode: str = "min") -> SweepView:
    return SweepView(name="sweep", directory="/s", metric=METRIC, mode=mode, num_trials=len(trials), trials=trials)


def result_of(view: SweepView) -> SweepResult:
    grid: Any = None
    return SweepResult("sweep", "/storage/sweep", "completed", None, view, grid)


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, RunDir]:
    return {trial.name: RunDir.at(str(tmp_path), trial.name) for trial in TRIALS}


def save(run_dir: RunDir, **value_at: float) -> None:
    for step, value in value_at.items():
        CheckpointStore(run_dir).write(int(step[1:]), {"state.pt": b""}, {METRIC: value}, {})


def test_the_best_trial_is_that_of_the_best_value_ever_with_the_checkpoint_of_it(runs: dict[str, RunDir]) -> None:
    save(runs["trial-0000"], s10=0.4, s20=0.2, s30=0.3)
    best = best_trial(view_of(*TRIALS), runs)
    assert best is not None
    assert (best.name, best.values, best.step, best.value) == ("trial-0000", {"lr": 0.1}, 20, 0.2)
    assert best.directory == runs["trial-0000"].path
    assert best.checkpoint == f"{runs['trial-0000'].path}/checkpoints/step-000000020"


def test_the_largest_is_best_where_the_sweep_says_so(runs: dict[str, RunDir]) -> None:
    save(runs["trial-0000"], s10=0.4, s20=0.2, s30=0.3)
    best = best_trial(view_of(*TRIALS, mode="max"), runs)
    assert best is not None
    assert (best.step, best.value, best.checkpoint[-14:]) == (10, 0.4, "step-000000010")


def test_a_best_trial_whose_checkpoints_are_gone_has_none(runs: dict[str, RunDir]) -> None:
    best = best_trial(view_of(*TRIALS), runs)
    assert best is not None
    assert best.checkpoint == ""


def test_without_a_finite_value_no_trial_is_best(runs: dict[str, RunDir]) -> None:
    assert best_trial(view_of(*TRIALS[1:]), runs) is None
    assert best_trial(view_of(), {}) is None


def test_the_table_has_a_row_for_each_trial_with_its_values_and_the_best_and_newest_of_its_curve() -> None:
    rows = result_of(view_of(*TRIALS)).table.to_dict("records")
    assert rows[0] == {
        "trial": "trial-0000",
        "state": "completed",
        "lr": 0.1,
        "step": 30,
        METRIC: 0.2,
        "best step": 20.0,
        "newest": 0.3,
        "directory": "/storage/sweep/trial-0000",
    }
    assert [row["lr"] for row in rows] == [0.1, 0.2, 9.0]
    assert all(math.isnan(row[METRIC]) for row in rows[1:]), "no value is not a best value"


def test_trials_that_failed_are_counted() -> None:
    assert result_of(view_of(*TRIALS)).num_failed == 1
    assert result_of(view_of()).num_failed == 0
