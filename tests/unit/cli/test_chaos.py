"""`raytrain chaos` refuses what cannot be rehearsed, and tells what it did."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.cli.app import run
from raytrain.cluster import chaos, fault_injection
from raytrain.events import kinds
from raytrain.events.log import EventLog, read
from raytrain.rundir import RunDir
from tests.unit.cluster.test_chaos import formed
from tests.unit.events.test_view import started


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir.at(str(tmp_path), "digits")
    EventLog(run_dir).append([started(), formed(20, 21)])
    return run_dir


def test_runs_that_cannot_be_disturbed_are_refused(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chaos", f"{run_dir.path}-nope"]) == 2
    assert "no events.jsonl" in capsys.readouterr().err
    assert run(["chaos", "s3://bucket/runs/digits?region=eu-west-1"]) == 2
    assert "not a local path" in capsys.readouterr().err
    EventLog(run_dir).append([kinds.RunEnded(outcome="completed", step=100, message="")])
    assert run(["chaos", run_dir.path]) == 2
    assert "completed at step 100" in capsys.readouterr().err


def test_a_script_is_carried_out_and_a_fault_without_a_victim_exits_1(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(fault_injection, "kill", sent.append)
    monkeypatch.setattr(fault_injection, "is_running_worker", lambda pid: pid in (20, 21))
    monkeypatch.setattr(chaos, "POLL_S", 0.001)
    script = tmp_path / "faults.txt"
    script.write_text("after 0 kill rank1\n")
    assert run(["chaos", run_dir.path, "--script", str(script)]) == 0
    assert sent == [21]
    assert capsys.readouterr().out == "   0.0 s  kill w21\n1 of 1 faults happened; the run: training, step 0 of 100\n"
    assert [event.target for event in read(run_dir) if isinstance(event, kinds.FaultInjected)] == ["w21"]
    monkeypatch.setattr(chaos, "RETRY_S", 0.0)
    script.write_text("after 0 kill w7\n")
    assert run(["chaos", run_dir.path, "--script", str(script)]) == 1
    assert "0 of 1 faults happened" in capsys.readouterr().out
