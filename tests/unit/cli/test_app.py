"""The command `raytrain`: help, errors with the nearest name, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain.cli.app import run
from raytrain.events.log import EventLog
from raytrain.rundir import RunDir
from tests.golden import check
from tests.unit.report.test_audit import PLAN, planned, write


@pytest.fixture(autouse=True)
def width_80(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize("command", ["", "audit", "ledger"])
def test_the_help_is_as_agreed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command.split(), "--help"]) == 0
    check(f"help_{command or 'raytrain'}.txt", capsys.readouterr().out)


def test_python_can_run_it_where_it_is_not_installed() -> None:
    done = subprocess.run([sys.executable, "-m", "raytrain", "audti"], capture_output=True, text=True, check=False)
    assert (done.returncode, "did you mean audit?" in done.stderr) == (2, True)


def test_no_command_shows_the_help_and_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "usage: raytrain" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "where", "fix"),
    [
        ("audti runs/a", "audti", "did you mean audit?"),
        ("audit runs/a --jsn", "--jsn", "did you mean --json?"),
        ("audit runs/a --js", "--js", "did you mean --json?"),
        ("--jsno", "--jsno", "did you mean --json?"),
        ("audit", "RUN_DIR", "see raytrain audit --help"),
        ("ledgr runs/a", "ledgr", "did you mean ledger?"),
        ("ledger", "RUN_DIR", "see raytrain ledger --help"),
        ("audit runs/a runs/b", "runs/b", "see raytrain --help"),
        ("audit runs/a --json=3", "--json", "see raytrain audit --help"),
        ("audit s4://bucket/runs/a", "s4://bucket/runs/a", "check how it is written"),
    ],
)
def test_wrong_use_is_told_in_four_parts(line: str, where: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 2
    shown = capsys.readouterr()
    first, value, rule, last = shown.err.splitlines()
    assert (shown.out, first, last) == ("", f"error: {where}", f"  fix:   {fix}")
    assert value.startswith("  value: ")
    assert rule.startswith("  rule:  ")


def test_an_audit_that_passes_exits_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = RunDir.at(str(tmp_path), "digits")
    write(run_dir, PLAN, planned(PLAN, 0, 5))
    assert run(["audit", str(tmp_path / "digits")]) == 0
    assert capsys.readouterr().out.startswith(f"audit passed: {tmp_path}/digits\n")
    assert run(["audit", f"file://{tmp_path}/digits/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 22


def test_an_audit_that_fails_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = RunDir.at(str(tmp_path), "digits")
    write(run_dir, PLAN, planned(PLAN, 0, 2))
    EventLog(run_dir).append(planned(PLAN, 3, 5))
    assert run(["audit", str(tmp_path / "digits"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["differences"][0] == "step 2: is not recorded"


def test_a_missing_run_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", str(tmp_path / "nope")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/nope\n  value: no run.json\n")
