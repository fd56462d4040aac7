"""`raytrain chaos` refuses what cannot be rehearsed, and tells what it did."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.cli.app import run
from raytrain.cluster import processes, rehearsal
from raytrain.events import kinds
from raytrain.events.log import EventLog, read
from raytrain.rundir import RunDir
from tests.golden import check
from tests.unit.cluster.test_rehearsal import formed
from tests.unit.events.test_view import started


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir.at(str(tmp_path), "digits")
    EventLog(run_dir).append([started(), formed(20, 21)])
    return run_dir


def test_the_help_is_as_agreed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chaos", "--help"]) == 0
    check("help_chaos.txt", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "where", "value"),
    [
        ("--every abc", "--every", "abc"),
        ("--every 0", "--every", "0"),
        ("--faults kil", "--faults", "kil"),
        ("--faults kill,drain", "--address", "not given"),
        ("--script nope.txt", "--script", "nope.txt"),
    ],
)
def test_wrong_use_is_told_in_four_parts(
    flags: str, where: str, value: str, run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["chaos", run_dir.path, *flags.split()]) == 2
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert (first, second) == (f"error: {where}", f"  value: {value}")


def test_runs_that_cannot_be_disturbed_are_refused(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chaos", f"{run_dir.path}-nope"]) == 2
    assert "no events.jsonl" in capsys.readouterr().err
    assert run(["chaos", "s3://bucket/runs/digits?region=eu-west-1"]) == 2
    assert "not a local path" in capsys.readouterr().err
    EventLog(run_dir).append([kinds.RunEnded(outcome="completed", step=100, message="")])
    assert run(["chaos", run_dir.path]) == 2
    assert "completed at step 100" in capsys.readouterr().err


def test_a_script_is_carried_out(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(processes, "kill", sent.append)
    monkeypatch.setattr(processes.Processes, "is_running_worker", lambda self, pid: pid in (20, 21))
    monkeypatch.setattr(rehearsal, "LOOK_EVERY_S", 0.001)
    script = tmp_path / "faults.txt"
    script.write_text("after 0 kill rank1\n")
    assert run(["chaos", run_dir.path, "--script", str(script)]) == 0
    assert sent == [21]
    assert capsys.readouterr().out == "   0.0 s  kill w21\n1 of 1 faults happened; the run: training, step 0 of 100\n"
    assert [event.target for event in read(run_dir) if isinstance(event, kinds.FaultInjected)] == ["w21"]


def test_a_fault_without_a_victim_exits_1(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rehearsal, "PATIENCE_S", 0.0)
    script = tmp_path / "faults.txt"
    script.write_text("after 0 kill w7\n")
    assert run(["chaos", run_dir.path, "--script", str(script)]) == 1
    assert "0 of 1 faults happened" in capsys.readouterr().out
