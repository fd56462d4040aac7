"""The directory of a run is a local path or a URI, and its JSON files are complete or absent."""

from __future__ import annotations

import io
import json
import os
import pickle
import time
from pathlib import Path

import pytest

from raytrain.errors import StorageError
from raytrain.launch.resume import read_metadata
from raytrain.launch.storage import absolute, check_writable
from raytrain.rundir import NoAnswer, RunDir
from tests.unit.checkpoint.faults import FaultyFilesystem, FirstFail, Hang


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
    for path in ("/my runs", "/my%20runs", "/100%", "/a#b?c", "/ä"):
        assert RunDir.at(f"file://{path}{slash}", "a").path == f"{path.replace('%20', ' ')}/a"
        assert absolute(f"file://{path}") == path.replace("%20", " "), "Ray and the workers get a path"
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


def test_r7_the_content_of_a_file_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a machine that fails may leave an empty run.json."""
    flushed: list[tuple[str, str]] = []

    def fsync(number: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        flushed.append((path.name, path.read_text()))

    monkeypatch.setattr("os.fsync", fsync)
    RunDir.at(str(tmp_path), "run").write_json({}, "run.json")
    assert flushed == [("run.json.new", "{}")]


@pytest.mark.parametrize("uri", ["file://runs", "file:runs"])
def test_r11_a_file_uri_without_an_absolute_path_is_refused(uri: str) -> None:
    for use in (lambda: absolute(uri), lambda: check_writable(uri, "a")):
        with pytest.raises(StorageError, match=f"{uri}: file:// is followed by an absolute path"):
            use()


@pytest.mark.parametrize(
    ("operation", "suffix"), [("open_input_stream", ""), ("get_file_info", ""), ("write", ".json.new"), ("move", "")]
)
def test_r6_a_storage_that_never_answers_is_an_error_that_names_the_file(
    tmp_path: Path, operation: str, suffix: str
) -> None:
    hang = Hang(operation, suffix)
    run_dir, start = hang.run_dir(tmp_path), time.monotonic()

    def use() -> None:
        run_dir.write_json({}, "run.json")
        run_dir.exists("run.json")
        run_dir.read_json("run.json")

    with pytest.raises(NoAnswer, match=rf"the storage has not answered for 0\.2 s: \w+ of {tmp_path}"):
        use()
    hang.over.set()
    assert (hang.has_begun, time.monotonic() - start < 20) == (True, True)


def test_r6_a_driver_does_not_wait_for_a_storage_that_never_answers(tmp_path: Path) -> None:
    hang = Hang("get_file_info", "checkpoints")
    with pytest.raises(StorageError, match=r"has not answered for 0\.2 s: get_file_info of"):
        read_metadata(hang.run_dir(tmp_path), "auto")
    hang.over.set()


def test_large_files_are_written_and_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain.rundir.BLOCK_BYTES", 7)
    run_dir = RunDir.at(str(tmp_path), "run")
    run_dir.write_json(list(range(50)), "a.json")
    assert run_dir.read_json("a.json") == list(range(50))
    with run_dir.filesystem.open_input_stream(run_dir.child("a.json")) as stream, io.BufferedReader(stream) as lines:
        assert len(list(lines)) == 52
