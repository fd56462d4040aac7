"""`raytrain submit`: which words are whose, what is refused before anything is sent, and what is said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from raytrain.cli.app import run
from raytrain.cluster.submit import follow, jobs
from raytrain.cluster.submit.jobs import Job, State, UnknownJobError
from tests.golden import check

SECRET = "s3cret-9f1c"


@pytest.fixture(autouse=True)
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "")  # so that it is restored


class Cluster:
    """Takes jobs, and says that they have succeeded, or raises."""

    def __init__(self) -> None:
        self.addresses: list[str | None] = []
        self.submitted: list[Job] = []
        self.state_of_all: Any = State("SUCCEEDED", 0)
        self.log_of_all: Any = "one\ntwo\n"

    def submit(self, job: Job) -> None:
        self.submitted.append(job)

    def state(self, name: str) -> State:
        if isinstance(self.state_of_all, Exception):
            raise self.state_of_all
        assert isinstance(self.state_of_all, State)
        return self.state_of_all

    def log(self, name: str) -> str:
        return str(self.log_of_all)

    async def tail(self, name: str) -> Any:
        if isinstance(self.log_of_all, BaseException):
            raise self.log_of_all
        yield self.log_of_all


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()

    def connect(address: str | None) -> Cluster:
        cluster.addresses.append(address)
        return cluster

    monkeypatch.setattr(jobs, "connect", connect)
    return cluster


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/digits.py").write_text('TABLE = "data/x.csv"\n')
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x.csv").write_text("1,2\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "command"),
    [
        *(("jobs/digits.py", ""), ("jobs/digits.py --lr 0.2 -x --no-follow y", " --lr 0.2 -x y")),
        ("--address http://h:1 jobs/digits.py --retries=0", ""),
        ("jobs/digits.py --env A=1,2 --env=B=x --lr -1", " --lr -1"),
        ("jobs/digits.py --exclude *.bin -- --follow -- --env x", " --follow -- --env x"),
        ("--working-dir . jobs/digits.py --addres x -path p", " --addres x -path p"),
    ],
)
def test_words_are_divided_between_us_and_the_job(line: str, command: str, cluster: Cluster, project: Path) -> None:
    assert run(["submit", *line.split()]) == 0
    (job,) = cluster.submitted
    assert job.entrypoint == f"python jobs/digits.py{command}"
    variables = {name: job.runtime_env["env_vars"].get(name) for name in "AB"}
    assert variables == ({"A": "1,2", "B": "x"} if "--env A" in line else {"A": None, "B": None})
    assert ("*.bin" in job.runtime_env["excludes"]) == ("--exclude" in line)


def test_a_job_is_submitted_with_what_it_needs_and_no_value_is_shown(
    cluster: Cluster, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("TOKEN", "NCCL_DEBUG", "MINE"):
        monkeypatch.setenv(name, SECRET)
    line = "jobs/digits.py --address http://me:pw@head:8265/ --name d1 --env TOKEN --run.forward-env MINE -- --note"
    assert run(["submit", *line.split(), "a b"]) == 0
    (job,) = cluster.submitted
    assert job.entrypoint == "python jobs/digits.py --run.forward-env MINE --note 'a b'"
    assert job.runtime_env["working_dir"] == str(project)
    secrets = dict.fromkeys(("NCCL_DEBUG", "MINE", "TOKEN"), SECRET)
    assert job.runtime_env["env_vars"] == {"RAYTRAIN_SUBMIT_DIRECTORY": str(project), **secrets}
    assert "/data" in job.runtime_env["excludes"]
    assert cluster.addresses == ["http://me:pw@head:8265/"]
    assert os.environ["RAY_API_SERVER_ADDRESS"] == "http://me:pw@head:8265/"
    out = capsys.readouterr().out
    check("submit_said.txt", out.replace(str(project), "/home/me/project"))
    assert SECRET not in out
    assert "pw" not in out


def test_the_address_may_come_from_the_environment(
    cluster: Cluster, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://b:8265")
    assert run(["submit", "jobs/digits.py"]) == 0
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://a:8265")
    assert run(["submit", "jobs/digits.py"]) == 0
    assert cluster.addresses == ["http://b:8265", "http://a:8265"]
    first, second = (job.name for job in cluster.submitted)
    assert first != second
    assert first.startswith("digits-")
    assert f"raytrain submit --attach {second} --address http://a:8265" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "where", "value"),
    [
        *(("", "SCRIPT, --attach", "neither"), ("jobs/digits.py --attach d1", "SCRIPT, --attach", "both")),
        *(("nope.py", "SCRIPT", "nope.py"), ("jobs/digits.py --retries 1", "--retries", "1")),
        ("jobs/digits.py --retries -1 --follow", "--retries", "-1"),
        *(("jobs/digits.py --reconnect x --follow", "--reconnect", "x"), ("jobs/digits.py --name a/b", "--name", "a/b")),
        *(("jobs/digits.py --env NOPE", "--env", "NOPE"), ("jobs/digits.py --working-dir nope", "--working-dir", "")),
        ("jobs/digits.py --include nope", "--include", "nope"),
    ],
)
def test_wrong_use_is_told_in_four_parts_before_anything_is_sent(
    line: str, where: str, value: str, cluster: Cluster, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["submit", *line.split()]) == 2
    first, second, third, fourth = capsys.readouterr().err.splitlines()
    assert first == f"error: {where}"
    assert second.startswith(f"  value: {value}")
    assert (third[:9], fourth[:9]) == ("  rule:  ", "  fix:   ")
    assert cluster.addresses == []


@pytest.mark.parametrize(("state", "code"), [(State("SUCCEEDED", 0), 0), (State("FAILED", 2), 2), (State("STOPPED"), 143)])
@pytest.mark.parametrize("line", ["jobs/digits.py --follow --name d1", "--attach d1"])
def test_r16_following_shows_the_log_and_ends_as_the_job(
    line: str, state: State, code: int, cluster: Cluster, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.state_of_all = state
    assert run(["submit", *line.split()]) == code
    words = "failed with exit code 2" if code == 2 else state.status.lower()
    assert capsys.readouterr().out.endswith(f"one\ntwo\nd1: {words}\n")
    assert len(cluster.submitted) == line.startswith("jobs")


def test_ctrl_c_leaves_the_job_alone_and_says_how_to_come_back(
    cluster: Cluster, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.log_of_all = KeyboardInterrupt()
    assert run(["submit", "jobs/digits.py", "--follow", "--name", "d1", "--address", "http://head:8265"]) == 130
    *_, goes_on, follow, stop = capsys.readouterr().out.splitlines()
    assert goes_on == "d1 keeps running"
    assert follow == "  follow: raytrain submit --attach d1 --address http://head:8265"
    assert stop == "  stop:   ray job stop d1 --address http://head:8265"


def test_a_job_that_the_cluster_does_not_know_cannot_be_followed(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.state_of_all = UnknownJobError("Job d1 does not exist")
    assert run(["submit", "--attach", "d1"]) == 2
    assert capsys.readouterr().err.startswith("error: --attach\n  value: d1: Job d1 does not exist\n")


def test_retries_are_for_lost_clusters(cluster: Cluster, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RETRY_EVERY_S", 0.001)
    answers: list[Any] = [UnknownJobError("no such job"), State("SUCCEEDED", 0)]
    monkeypatch.setattr(cluster, "state", lambda name: next(raised(answers)))
    assert run(["submit", "jobs/digits.py", "--follow", "--retries", "1", "--name", "d1", "--run.steps", "3"]) == 0
    assert [job.name for job in cluster.submitted] == ["d1", "d1-2"]
    assert {job.entrypoint for job in cluster.submitted} == {"python jobs/digits.py --run.steps 3"}


def raised(answers: list[Any]) -> Any:
    answer = answers.pop(0)
    if isinstance(answer, Exception):
        raise answer
    yield answer
