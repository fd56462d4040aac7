"""A storage that cannot be used is refused, naming the place or the nodes that do not see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.elastic.variables import SUBMIT_DIRECTORY
from raytrain.errors import StorageError
from raytrain.launch import storage
from raytrain.launch.storage import absolute, check_shared, check_writable, is_moved, moved_to
from raytrain.rundir import RunDir
from tests.golden import check


def test_r11_a_relative_path_means_the_directory_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("runs") == str(tmp_path / "runs")
    assert absolute("~/runs") == str(Path.home() / "runs")
    assert absolute("s3://bucket/runs") == "s3://bucket/runs"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory such as the one into which Ray unpacks a job; the driver is in it, or in a folder of it."""
    copy = tmp_path / "session/runtime_resources/working_dir_files/_ray_pkg_1/jobs"
    copy.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(SUBMIT_DIRECTORY, raising=False)
    monkeypatch.chdir(copy)
    return copy


def test_r11_in_a_job_a_relative_path_means_the_home_directory(job: Path, tmp_path: Path) -> None:
    paths = ["./runs", "/mnt/runs", "~/runs", "s3://bucket/runs"]
    assert [is_moved(path) for path in paths] == [True, False, False, False]
    home = str(tmp_path / "home/runs")
    assert [absolute(path) for path in paths] == [home, "/mnt/runs", home, "s3://bucket/runs"]


def test_r11_in_a_job_a_relative_path_means_the_submit_directory_where_that_is_seen(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    for called_in, base in (("project", "project"), ("not here", "home")):
        monkeypatch.setenv(SUBMIT_DIRECTORY, str(tmp_path / called_in))
        assert absolute("runs") == str(tmp_path / base / "runs")
    monkeypatch.chdir(tmp_path)
    assert absolute("runs") == str(tmp_path / "runs"), "the driver is in a directory that stays"


def test_r11_a_path_that_is_moved_is_told(tmp_path: Path) -> None:
    told = moved_to(RunDir.at("/home/me/runs", "digits"))
    assert told.startswith("the run is kept in /home/me/runs/digits, since the directory of a job goes away")


def test_a_storage_that_can_be_written_is_left_clean(tmp_path: Path) -> None:
    run_dir = check_writable(str(tmp_path), "line")
    assert run_dir.exists()
    assert list((tmp_path / "line").iterdir()) == []


def test_r11_a_local_path_that_some_nodes_do_not_see_is_refused_naming_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_for: list[str] = []

    def blind(mark: str) -> list[str]:
        looked_for.append(mark)
        assert Path(mark).exists()
        return ["10.0.0.2", "10.0.0.3"]

    monkeypatch.setattr(storage, "_nodes_that_do_not_see", blind)
    run_dir = check_writable(str(tmp_path), "line")
    with pytest.raises(StorageError) as caught:
        check_shared(run_dir, "/home/me/runs")
    check("errors/not_shared.txt", f"{caught.value}\n")
    assert not Path(looked_for[0]).exists()


def test_r11_a_path_that_all_nodes_see_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_nodes_that_do_not_see", lambda mark: [])
    check_shared(check_writable(str(tmp_path), "line"), str(tmp_path))
    assert list((tmp_path / "line").iterdir()) == []
