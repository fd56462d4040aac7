"""Two runs side by side: texts, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytrain.checkpoint.store import CheckpointStore
from raytrain.cli.app import run
from raytrain.events import kinds
from raytrain.rundir import RunDir
from tests.golden import check
from tests.unit.report.test_comparison import PLAN, digest, done, write


@pytest.fixture(autouse=True)
def width_80(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunDir, RunDir]:
    """a, which is whole, and b, which is yet to be written."""
    a, b = (RunDir.at(str(tmp_path), name) for name in "ab")
    write(a, [done(0, 0.5, 0.4, 0.3, 0.2), digest(2), digest(4)])
    CheckpointStore(a).write(4, {"model.safetensors": b"weights", "state.pt": b"rest"}, {}, {})
    return a, b


def shown(runs: tuple[RunDir, RunDir], capsys: pytest.CaptureFixture[str], code: int, *flags: str) -> str:
    assert run(["compare", runs[0].path, runs[1].path, *flags]) == code
    return capsys.readouterr().out.replace(str(Path(runs[0].path).parent), "/runs")


def test_the_help_is_as_agreed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "--help"]) == 0
    check("help_compare.txt", capsys.readouterr().out)


def test_identical_runs_exit_0(runs: tuple[RunDir, RunDir], capsys: pytest.CaptureFixture[str]) -> None:
    write(runs[1], [done(0, 0.5, 0.4, 0.3, 0.2), digest(2), digest(4)])
    CheckpointStore(runs[1]).write(4, {"model.safetensors": b"weights", "state.pt": b"rest"}, {}, {})
    check("compare_identical.txt", shown(runs, capsys, 0))
    assert json.loads(shown(runs, capsys, 0, "--json"))["through_step"] == 4


def test_runs_that_differ_exit_1(runs: tuple[RunDir, RunDir], capsys: pytest.CaptureFixture[str]) -> None:
    write(runs[1], [done(0, 0.5, 0.4, 0.3, float("nan")), digest(2), digest(4, {"0.bias": "b1", "0.bias.exp_avg": "d1"})])
    CheckpointStore(runs[1]).write(4, {"model.safetensors": b"other", "state.pt": b"rest"}, {}, {})
    runs[1].write_json({"plan": PLAN, "run": {"precision": "bf16"}}, "run.json")
    check("compare_different.txt", shown(runs, capsys, 1))
    value = json.loads(shown(runs, capsys, 1, "--json"))
    assert value["identical"] is False
    assert value["digests"]["first_difference"]["tensors"] == ["0.bias", "0.bias.exp_avg"]


def test_without_digests_it_says_so_and_how_to_record_them(
    runs: tuple[RunDir, RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    write(runs[1], [done(0, 0.5, 0.4, 0.3, 0.2)])
    check("compare_losses.txt", shown(runs, capsys, 0))


def test_a_difference_in_losses_alone_is_in_the_first_line(
    runs: tuple[RunDir, RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    write(runs[1], [done(0, 0.5, 0.4000000001, 0.3), digest(2)])
    assert shown(runs, capsys, 1).splitlines()[0] == "compare DIFFERENT in the loss of step 1: /runs/a and /runs/b"


def test_a_difference_in_saved_weights_alone_is_in_the_first_line(
    runs: tuple[RunDir, RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    write(runs[1], [done(0, 0.5)])
    CheckpointStore(runs[1]).write(4, {"model.safetensors": b"other", "state.pt": b"other"}, {}, {})
    lines = shown(runs, capsys, 1).splitlines()
    assert lines[0] == "compare DIFFERENT in saved weights: /runs/a and /runs/b"
    assert "  files     2 of checkpoints compared; different: model.safetensors of step 4, state.pt of step 4" in lines


def test_a_pickled_file_that_differs_does_not_count(runs: tuple[RunDir, RunDir], capsys: pytest.CaptureFixture[str]) -> None:
    write(runs[1], [done(0, 0.5)])
    CheckpointStore(runs[1]).write(4, {"model.safetensors": b"weights", "state.pt": b"other"}, {}, {})
    assert "so they do not count" in shown(runs, capsys, 0)


@pytest.mark.parametrize("events", [[], [digest(3)]])
def test_runs_with_nothing_in_common_exit_2(
    runs: tuple[RunDir, RunDir], capsys: pytest.CaptureFixture[str], events: list[kinds.Event]
) -> None:
    write(runs[1], events)
    assert run(["compare", runs[0].path, runs[1].path]) == 2
    assert "  value: 4 finished steps and 0 finished steps\n" in capsys.readouterr().err


def test_runs_of_different_plans_exit_2(runs: tuple[RunDir, RunDir], capsys: pytest.CaptureFixture[str]) -> None:
    write(runs[1], [done(0, 0.5)], PLAN | {"seed": 8, "global_batch": 6})
    assert run(["compare", runs[0].path, runs[1].path]) == 2
    text = capsys.readouterr().err.replace(str(Path(runs[0].path).parent), "/runs")
    check("errors/different_plans.txt", text.removeprefix("error: "))


def test_a_missing_run_exits_2(runs: tuple[RunDir, RunDir], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", runs[0].path, runs[1].path]) == 2
    assert capsys.readouterr().err.startswith(f"error: {runs[1].path}\n  value: no run.json\n")


def test_one_run_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "runs/a"]) == 2
    assert capsys.readouterr().err.splitlines()[0] == "error: OTHER_DIR"
