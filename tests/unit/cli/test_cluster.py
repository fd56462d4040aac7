"""`raytrain cluster render` and `raytrain cluster check`: what they write, refuse and return."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.cli.app import run
from tests.unit.cluster.file.support import REPOSITORY, edited, rendered

LOCAL = "cluster render --provider local --head-ip 10.77.0.1 --worker-ips 10.77.0.2,10.77.0.3 --ssh-user root"


@pytest.fixture(autouse=True)
def somewhere_with_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in (".ray/auth_token", ".ssh/id_ed25519"):
        (tmp_path / "home" / name).parent.mkdir(parents=True)
        (tmp_path / "home" / name).write_text("secret")
    monkeypatch.chdir(REPOSITORY)


def test_render_writes_to_stdout_or_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "render", "--provider", "aws"]) == 0
    assert capsys.readouterr().out == rendered("aws")
    assert run(["cluster", "render", "--provider", "aws", "--out", str(tmp_path / "c.yaml")]) == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "c.yaml").read_text() == rendered("aws")


def test_all_flags_of_a_small_cluster_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--ssh-key ~/.ssh/id_ed25519 --worker-cpus 1 --head-cpus 0 --object-store-memory 100000000 --setup none"
    assert run([*LOCAL.split(), *flags.split()]) == 0
    expected = rendered("local", ssh_key="~/.ssh/id_ed25519", worker_cpus=1, object_store_memory=100_000_000, setup="none")
    assert capsys.readouterr().out == expected


def test_a_rendered_file_has_no_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "c.yaml")
    assert run([*LOCAL.split(), "--out", file]) == 0
    assert run(["cluster", "check", file]) == 0
    assert run(["cluster", "check", "cluster.yaml", "--workers", "4:10"]) == 0
    assert capsys.readouterr().out == "no mistakes\nno mistakes\n"


def test_mistakes_are_listed_and_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(edited(rendered("aws"), "head_node_type: head", "head_node_type: haed"))
    assert run(["cluster", "check", str(file), "--workers", "4:64"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{file}:24: max_workers"
    assert lines[4:] == [
        *(f"{file}:32: head_node_type", "  value: haed", "  rule:  is one of available_node_types"),
        *("  fix:   did you mean head?", "2 mistakes"),
    ]


def test_what_is_copied_is_looked_for_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["cluster", "check", str(REPOSITORY / "cluster.yaml")]) == 1
    assert capsys.readouterr().out.count("is a file or directory on this machine") == 4
