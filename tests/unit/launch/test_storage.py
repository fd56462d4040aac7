"""An unusable storage is refused, naming the path or the nodes that do not see it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import TaskUnschedulableError

from raytrain.elastic.environment import SUBMIT_DIRECTORY
from raytrain.errors import StorageError
from raytrain.launch import storage
from raytrain.launch.storage import absolute, check_shared, check_writable, is_moved, moved_to
from raytrain.rundir import RunDir
from tests.golden import check


def test_r11_a_path_is_resolved_against_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("runs") == str(tmp_path / "runs")
    assert absolute("~/runs") == str(Path.home() / "runs")
    assert absolute("s3://bucket/runs") == "s3://bucket/runs"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory like the one into which Ray unpacks a job; it is the working directory."""
    copy = tmp_path / "session/runtime_resources/working_dir_files/_ray_pkg_1/jobs"
    copy.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(SUBMIT_DIRECTORY, raising=False)
    monkeypatch.chdir(copy)
    return copy


def test_r11_in_a_job_a_relative_path_is_resolved_against_the_submit_directory(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = ["./runs", "/mnt/runs", "~/runs", "s3://bucket/runs"]
    assert [is_moved(path) for path in paths] == [True, False, False, False]
    home = str(tmp_path / "home/runs")
    assert [absolute(path) for path in paths] == [home, "/mnt/runs", home, "s3://bucket/runs"]
    (tmp_path / "project").mkdir()
    for submit_directory, base in (("project", "project"), ("missing", "home")):
        monkeypatch.setenv(SUBMIT_DIRECTORY, str(tmp_path / submit_directory))
        assert absolute("runs") == str(tmp_path / base / "runs")
    message = moved_to(RunDir.at("/home/me/runs", "digits"))
    assert message.startswith("the run is stored in /home/me/runs/digits, because the working directory of a job")
    monkeypatch.chdir(tmp_path)
    assert absolute("runs") == str(tmp_path / "runs"), "not in a job's directory"


def test_r11_a_node_that_dies_while_it_is_asked_does_not_keep_the_run_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {"sees": True, "blind": False, "silent": None, "dead": TaskUnschedulableError("it is gone")}

    def get(node: str) -> bool:
        if isinstance(answers[node], Exception):
            raise answers[node]
        return bool(answers[node])

    look = SimpleNamespace(
        options=lambda scheduling_strategy: SimpleNamespace(remote=lambda mark: scheduling_strategy.node_id)
    )
    fake = SimpleNamespace(
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "mine"),
        remote=lambda **options: lambda function: look,
        nodes=lambda: [{"NodeID": node, "Alive": True, "NodeManagerAddress": node} for node in ["mine", *answers]],
        wait=lambda asked, **how: ([node for node in asked if node != "silent"], ["silent"]),
        get=get,
    )
    monkeypatch.setattr(storage, "ray", fake)
    monkeypatch.setattr(storage, "NodeAffinitySchedulingStrategy", lambda node, soft: SimpleNamespace(node_id=node))
    assert storage._nodes_that_do_not_see("mark") == ["blind", "silent"]


@pytest.mark.parametrize("blind", [["10.0.0.2", "10.0.0.3"], []])
def test_r11_a_path_that_some_nodes_do_not_see_is_refused_naming_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blind: list[str]
) -> None:
    def look(mark: str) -> list[str]:
        assert Path(mark).exists()
        return blind

    monkeypatch.setattr(storage, "_nodes_that_do_not_see", look)
    run_dir = check_writable(str(tmp_path), "line")
    with pytest.raises(StorageError) if blind else nullcontext() as caught:
        check_shared(run_dir, "/home/me/runs")
    if caught:
        check("errors/not_shared.txt", f"{caught.value}\n")
    assert list((tmp_path / "line").iterdir()) == [], "no probe is left"
