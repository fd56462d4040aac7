"""The directory of a run is a local path or a URI, and its JSON files are complete or absent."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from raytrain.rundir import RunDir
from tests.unit.checkpoint.faults import FaultyFilesystem, FirstFail


def test_r11_local_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/somewhere")
    run_dir = RunDir.at("./runs", "digits")
    monkeypatch.chdir("/")
    assert (run_dir.path, run_dir.is_local) == (f"{tmp_path}/runs/digits", True)
    assert RunDir.at("~/runs", "a").path == "/somewhere/runs/a"
    assert pickle.loads(pickle.dumps(run_dir)) == run_dir


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_uri_chooses_the_filesystem(tmp_path: Path, slash: str) -> None:
    local = RunDir.at(f"file://{tmp_path}{slash}", "a")
    assert (local.path, local.is_local) == (f"{tmp_path}/a", True)
    mock = RunDir.at(f"mock:///bucket/runs{slash}", "a")
    assert (mock.path, mock.is_local) == ("bucket/runs/a", False)


@pytest.mark.parametrize("filesystem", ["local", "mock"])
def test_json_comes_back_as_it_was_written(tmp_path: Path, filesystem: str) -> None:
    run_dir = RunDir.at(str(tmp_path) if filesystem == "local" else "mock:///bucket", "run")
    assert not run_dir.exists("a", "run.json")
    for value in ({"x": [1, 2.5, None, "ä"]}, {}):
        run_dir.write_json(value, "a", "run.json")
        assert run_dir.exists("a", "run.json")
        assert run_dir.read_json("a", "run.json") == value
    run_dir.write_json(1, "top.json")
    assert run_dir.read_json("top.json") == 1


def test_a_missing_file_and_an_invalid_one_raise_different_errors(tmp_path: Path) -> None:
    run_dir = RunDir.at(str(tmp_path), "run")
    with pytest.raises(FileNotFoundError):
        run_dir.read_json("run.json")
    run_dir.write_json({}, "run.json")
    (tmp_path / "run/run.json").write_text('{"half": ')
    with pytest.raises(json.JSONDecodeError):
        run_dir.read_json("run.json")


def test_r7_a_failed_write_leaves_the_old_file_whole(tmp_path: Path) -> None:
    RunDir.at(str(tmp_path), "run").write_json({"old": 1}, "run.json")
    for operation in ("write", "move"):
        fault = FirstFail(operation, times=1)
        broken = RunDir(FaultyFilesystem(fault), str(tmp_path / "run"), is_local=True)
        with pytest.raises(OSError, match="Input/output error"):
            broken.write_json({"new": 2}, "run.json")
        assert fault.left == 0
        assert RunDir.at(str(tmp_path), "run").read_json("run.json") == {"old": 1}
