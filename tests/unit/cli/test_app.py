"""The command `raytrain`: help, errors with the nearest name, exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raytrain.cli.app import run
from tests.golden import check

COMMANDS = ["", "audit", "compare", "ledger", "chaos", "cluster", "cluster render", "cluster check", "submit", "doctor"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_is_as_agreed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command.split(), "-h"]) == 0
    check(f"help_{command.replace(' ', '_') or 'raytrain'}.txt", capsys.readouterr().out)


def test_r16_python_can_run_it_where_it_is_not_installed() -> None:
    done = subprocess.run([sys.executable, "-m", "raytrain", "audti"], capture_output=True, text=True, check=False)
    assert (done.returncode, "did you mean audit?" in done.stderr) == (2, True)


def test_no_command_shows_the_help_and_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "Usage: raytrain" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "where", "value", "fix"),
    [
        ("audti runs/a", "audti", "no such name", "did you mean audit?"),
        ("audit runs/a --jsn", "--jsn", "no such name", "did you mean --json?"),
        ("audit runs/a --js", "--js", "no such name", "did you mean --json?"),
        ("--jsno", "--jsno", "no such name", "did you mean --json?"),
        ("audit", "RUN_DIR", "not given", "see raytrain audit --help"),
        ("audit runs/a runs/b", "runs/b", "one argument too many", "see raytrain audit --help"),
        ("audit runs/a --json=3", "--json", "not understood", "see raytrain audit --help"),
        ("audit s4://bucket/runs/a", "s4://bucket/runs/a", None, "check its spelling"),
        ("compare runs/a", "OTHER_DIR", "not given", "see raytrain compare --help"),
        ("chaos runs/a --every abc", "--every", "abc", "see raytrain chaos --help"),
        ("chaos runs/a --every 0", "--every", "0", "see raytrain chaos --help"),
        ("chaos runs/a --every", "--every", "not understood", "see raytrain chaos --help"),
        ("chaos runs/a --every --for 3", "--every", "not given", "see raytrain chaos --help"),
        ("chaos runs/a --faults kil", "--faults", "kil", None),
        ("chaos runs/a --faults kill,drain", "--address", "not given", "give the cluster's address, or set RAY_ADDRESS"),
        ("chaos runs/a --script nope.txt", "--script", "nope.txt", "give the path of one"),
        ("cluster", "raytrain cluster", "no command", "see raytrain cluster --help"),
        ("cluster rendr --provider aws", "rendr", "no such name", "did you mean render?"),
        ("cluster render", "--provider", "not given", "see raytrain cluster render --help"),
        ("cluster render --provider awss", "--provider", "awss", "see raytrain cluster render --help"),
        ("cluster render --provider aws --workers x", "--workers", None, "see raytrain cluster render --help"),
        ("cluster render --provider aws --disk-gb 0", "--disk-gb", "0", "see raytrain cluster render --help"),
        ("cluster render --provider aws --wrkers 3", "--wrkers", "no such name", "did you mean --workers?"),
        ("cluster render --provider gcp", "--project-id", "not given", None),
        ("cluster render --provider aws --out /nowhere/c.yaml", "--out", "/nowhere/c.yaml", "give another path"),
        ("cluster check nope.yaml", "FILE", "nope.yaml", "give the path of one"),
        ("cluster check cluster.yaml --workers x", "--workers", "x", "write it like 4:64"),
        ("cluster check cluster.yaml --workers 0:4", "--workers", "0:4", "write it like 4:64"),
        ("doctor --workers many", "--workers", "many", "write it like: 4 or 4:64"),
        ("doctor --workers=-2", "--workers", "-2", "write it like: 4 or 4:64"),
        ("doctor --limit 0", "--limit", "0", "see raytrain doctor --help"),
        ("doctor --strage x", "--strage", "no such name", "did you mean --storage?"),
        ("submit --folow job.py", "--folow", "no such name", "did you mean --follow?"),
        ("submit --lr 1 job.py", "--lr", "no such name", None),
        ("submit job.py --env --", "--env", "not given", "see raytrain submit --help"),
    ],
)
def test_wrong_use_is_told_in_four_parts(
    line: str, where: str, value: str | None, fix: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2
    shown = capsys.readouterr()
    first, *rest = shown.err.splitlines()
    assert (shown.out, first) == ("", f"error: {where}")
    assert [line[:9] for line in rest] == ["  value: ", "  rule:  ", "  fix:   "]
    assert value in (None, rest[0][9:])
    assert fix in (None, rest[2][9:])
