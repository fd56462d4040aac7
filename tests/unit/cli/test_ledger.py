"""The ledger of a run, as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytrain.cli.app import run
from raytrain.console.demo import START, demo_events
from raytrain.events import kinds
from raytrain.events.log import EventLog
from raytrain.rundir import RunDir
from tests.golden import check


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.at(str(tmp_path), "digits")


def shown(run_dir: RunDir, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert run(["ledger", run_dir.path, *flags]) == 0
    return capsys.readouterr().out.replace(run_dir.path, "/runs/digits")


def test_the_table_is_as_agreed(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    EventLog(run_dir).append(demo_events(460, ended=True))
    check("ledger.txt", shown(run_dir, capsys))


def test_a_run_that_was_killed_and_started_again_is_counted_to_its_last_event(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    EventLog(run_dir).append(demo_events(100))
    EventLog(run_dir).append(demo_events(40))
    lines = shown(run_dir, capsys).splitlines()
    assert lines[0] == "ledger of /runs/digits: not ended, counted to its last event, step 40 of 460, 2 starts"
    assert lines[-1] == "goodput 29.2 %: 5.0 s of training in 17.0 s"


def test_as_json_the_classes_add_up_to_the_wall_time(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    EventLog(run_dir).append(demo_events(460, ended=True))
    found = json.loads(shown(run_dir, capsys, "--json"))
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_s"], abs=1e-6)
    assert found["goodput"] == pytest.approx(found["seconds"]["training"] / found["wall_s"])
    assert (found["outcome"], found["step"], found["num_steps"], found["sessions"]) == ("completed", 460, 460, 1)


def test_before_a_run_has_taken_any_time_there_is_no_goodput(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    EventLog(run_dir).append(demo_events(0)[:1])
    assert shown(run_dir, capsys).splitlines()[-1] == "goodput 0.0 %: 0 ms of training in 0 ms"


def test_a_missing_run_exits_2(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ledger", run_dir.path]) == 2
    assert capsys.readouterr().err.startswith(f"error: {run_dir.path}\n  value: no events.jsonl, or no start of a run")
    Path(run_dir.path).write_text("a file where a directory should be")
    assert run(["ledger", run_dir.path]) == 2
    assert capsys.readouterr().err.startswith(f"error: {run_dir.path}\n  value: no events.jsonl")


def test_a_log_that_cannot_be_read_exits_2(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    Path(run_dir.child("events.jsonl")).mkdir(parents=True)
    assert run(["ledger", run_dir.path]) == 2
    assert "events.jsonl can be read" in capsys.readouterr().err


def test_an_event_of_another_kind_alone_is_no_run(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    EventLog(run_dir).append([kinds.Printed(time=START, rank=0, stream="stdout", text="")])
    assert run(["ledger", run_dir.path]) == 2
