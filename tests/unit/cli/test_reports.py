"""`raytrain audit`, `compare` and `ledger`: texts, JSON, exit codes, and how a run is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytrain.checkpoint.store import CheckpointStore
from raytrain.cli.app import run
from raytrain.cli.reports import run_dir_at
from raytrain.events import kinds
from raytrain.events.log import EventLog
from raytrain.rundir import RunDir
from tests.golden import check
from tests.support.demo_run import START, demo_events
from tests.unit.report import test_audit, test_comparison
from tests.unit.report.test_comparison import digest, done, write


@pytest.mark.parametrize(
    ("text", "path"),
    [("digits", "{here}/digits"), ("runs/digits/", "{here}/runs/digits"), (".", "{here}"), ("/digits", "/digits")],
)
def test_a_path_is_relative_to_here(text: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_dir_at(text).path == path.format(here=tmp_path)


def test_the_options_of_a_uri_stay_with_its_storage() -> None:
    run_dir = run_dir_at("s3://bucket/runs/digits?region=eu-west-1&endpoint_override=localhost:1")
    assert (run_dir.path, run_dir.is_local, run_dir.filesystem.region) == ("bucket/runs/digits", False, "eu-west-1")


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunDir, RunDir]:
    """a, which is complete, and b, which is yet to be written."""
    a, b = (RunDir.at(str(tmp_path), name) for name in "ab")
    write(a, [done(0, 0.5, 0.4, 0.3, 0.2), digest(2), digest(4)])
    save(a, "weights", "rest")
    return a, b


def save(run_dir: RunDir, weights: str, state: str) -> None:
    CheckpointStore(run_dir).write(4, {"model.safetensors": weights.encode(), "state.pt": state.encode()}, {}, {})


def compared(runs: tuple[RunDir, RunDir], capsys: pytest.CaptureFixture[str], code: int, *flags: str) -> str:
    assert run(["compare", runs[0].path, runs[1].path, *flags]) == code
    shown = capsys.readouterr()
    return (shown.out or shown.err).replace(str(Path(runs[0].path).parent), "/runs")


def test_an_audit_exits_0_if_it_passed_and_1_if_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, plan = RunDir.at(str(tmp_path), "digits"), test_audit.PLAN
    test_audit.write(run_dir, plan, test_audit.planned(plan, 0, 2))
    EventLog(run_dir).append(test_audit.planned(plan, 3, 5))
    assert run(["audit", str(tmp_path / "digits"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["differences"][0] == "step 2: is not recorded"
    EventLog(run_dir).append(test_audit.planned(plan, 2, 5))
    assert run(["audit", f"file://{tmp_path}/digits/"]) == 0
    assert capsys.readouterr().out.startswith(f"audit passed: {tmp_path}/digits\n")


def test_identical_runs_exit_0(runs: tuple[RunDir, RunDir], capsys: pytest.CaptureFixture[str]) -> None:
    write(runs[1], [done(0, 0.5, 0.4, 0.3, 0.2), digest(2), digest(4)])
    save(runs[1], "weights", "rest")
    check("compare_identical.txt", compared(runs, capsys, 0))
    assert json.loads(compared(runs, capsys, 0, "--json"))["through_step"] == 4


def test_runs_that_differ_exit_1(runs: tuple[RunDir, RunDir], capsys: pytest.CaptureFixture[str]) -> None:
    write(runs[1], [done(0, 0.5, 0.4, 0.3, float("nan")), digest(2), digest(4, {"0.bias": "b1", "0.bias.exp_avg": "d1"})])
    save(runs[1], "other", "rest")
    runs[1].write_json({"plan": test_comparison.PLAN, "run": {"precision": "bf16"}}, "run.json")
    check("compare_different.txt", compared(runs, capsys, 1))


@pytest.mark.parametrize(
    ("events", "files", "code", "line"),
    [
        ([done(0, 0.5, 0.4000000001, 0.3), digest(2)], ("weights", "rest"), 1, "compare DIFFERENT in the loss of step 1: "),
        ([done(0, 0.5)], ("other", "other"), 1, "compare DIFFERENT in saved weights: /runs/a and /runs/b\n"),
        ([done(0, 0.5)], ("weights", "other"), 0, "so they do not count"),
    ],
)
def test_what_differs_alone_is_told(
    events: list[kinds.Event],
    files: tuple[str, str],
    code: int,
    line: str,
    runs: tuple[RunDir, RunDir],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(runs[1], events)
    save(runs[1], *files)
    assert line in compared(runs, capsys, code)


def test_runs_that_cannot_be_compared_exit_2(runs: tuple[RunDir, RunDir], capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(runs, capsys, 2).startswith("error: /runs/b\n  value: no run.json\n")
    write(runs[1], [digest(3)])
    assert "  value: 4 finished steps and 0 finished steps\n" in compared(runs, capsys, 2)
    write(runs[1], [done(0, 0.5)], test_comparison.PLAN | {"seed": 8, "global_batch": 6})
    check("errors/different_plans.txt", compared(runs, capsys, 2).removeprefix("error: "))


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.at(str(tmp_path), "digits")


def ledger_of(run_dir: RunDir, capsys: pytest.CaptureFixture[str], code: int, *flags: str) -> str:
    assert run(["ledger", run_dir.path, *flags]) == code
    shown = capsys.readouterr()
    return (shown.out or shown.err).replace(run_dir.path, "/runs/digits")


def test_a_ledger_is_a_table_or_json(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    EventLog(run_dir).append(demo_events(460, ended=True))
    check("ledger.txt", ledger_of(run_dir, capsys, 0))
    found = json.loads(ledger_of(run_dir, capsys, 0, "--json"))
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_s"], abs=1e-6)
    assert found["goodput"] == pytest.approx(found["seconds"]["training"] / found["wall_s"])
    assert (found["outcome"], found["step"], found["num_steps"], found["sessions"]) == ("completed", 460, 460, 1)


def test_the_ledger_of_a_killed_run_counts_to_its_last_event(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    EventLog(run_dir).append(demo_events(0)[:1])
    assert ledger_of(run_dir, capsys, 0).splitlines()[-1] == "goodput 0.0 %: 0 ms of training in 0 ms"
    EventLog(run_dir).append([*demo_events(100)[1:], *demo_events(40)])
    lines = ledger_of(run_dir, capsys, 0).splitlines()
    assert lines[0] == "ledger of /runs/digits: not ended, counted to its last event, step 40 of 460, 2 starts"
    assert lines[-1] == "goodput 29.2 %: 5.0 s of training in 17.0 s"


def test_what_is_no_run_has_no_ledger(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    missing = "error: /runs/digits\n  value: no events.jsonl, or no start of a run"
    assert ledger_of(run_dir, capsys, 2).startswith(missing)
    EventLog(run_dir).append([kinds.OutputLine(time=START, rank=0, stream="stdout", text="")])
    assert ledger_of(run_dir, capsys, 2).startswith(missing)


@pytest.mark.parametrize(
    ("is_directory", "words"), [(False, "  value: no events.jsonl\n"), (True, "events.jsonl can be read")]
)
def test_an_unreadable_log_exits_2(
    is_directory: bool, words: str, run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    if is_directory:
        Path(run_dir.child("events.jsonl")).mkdir(parents=True)
    else:
        Path(run_dir.path).write_text("a file instead of a directory")
    assert words in ledger_of(run_dir, capsys, 2)
