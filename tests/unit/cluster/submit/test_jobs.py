"""Errors of Ray's client become those that raytrain acts on; a job gets the shell's variables, none is shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus

from raytrain.cluster.submit import jobs as module
from raytrain.cluster.submit.jobs import Job, Jobs, NoAnswerError, State, UnknownJobError, connect, forwarded_env
from raytrain.elastic.environment import SUBMIT_DIRECTORY
from raytrain.errors import ConfigError, ResourceError
from tests.golden import check

JOB = Job("digits-1", "python digits.py", {"working_dir": "/x", "env_vars": {"A": "1"}})
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1\n'
REFUSED = f"{TRACEBACK}ValueError: Job with submission_id digits-1 already exists.\n"


class Client:
    """Ray's client, which raises, or answers."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.submitted = error, {}

    def _answer(self, answer: Any) -> Any:
        if self.error:
            raise self.error
        return answer

    def submit_job(self, **named: Any) -> str:
        self.submitted = named
        return str(self._answer("digits-1"))

    def get_job_info(self, name: str) -> Any:
        told = {"status": JobStatus.FAILED, "driver_exit_code": 2, "error_type": None, "message": None}
        return self._answer(SimpleNamespace(**told))

    def get_job_logs(self, name: str) -> str:
        return str(self._answer("log"))

    async def tail_job_logs(self, name: str) -> AsyncIterator[str]:
        yield "a piece"
        self._answer("")


def test_a_job_is_submitted_as_it_is() -> None:
    client = Client()
    Jobs(client).submit(JOB)
    expected = {"entrypoint": JOB.entrypoint, "submission_id": JOB.name, "runtime_env": JOB.runtime_env}
    assert client.submitted == expected
    assert Jobs(client).state("digits-1") == State("FAILED", 2, "", "")
    assert Jobs(client).log("digits-1") == "log"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        *((requests.ConnectionError("refused"), NoAnswerError), (requests.ReadTimeout("slow"), NoAnswerError)),
        (ConnectionError("Failed to connect to Ray at address: http://x."), NoAnswerError),
        (RuntimeError("Request failed with status code 503: no."), NoAnswerError),
        (RuntimeError(f"Request failed with status code 500: {TRACEBACK}OSError: agent\n."), NoAnswerError),
        (RuntimeError("Request failed with status code 404: Job digits-1 does not exist."), UnknownJobError),
        (RuntimeError("Request failed with status code 413: Maximum request body size exceeded."), ResourceError),
        (RuntimeError(f"Request failed with status code 500: {REFUSED}."), ResourceError),
        (AuthenticationError("Authentication required: Missing authentication token"), ConfigError),
    ],
)
def test_errors_of_rays_client_are_translated(error: Exception, kind: type[Exception]) -> None:
    for ask in (lambda jobs: jobs.submit(JOB), lambda jobs: jobs.state("digits-1"), lambda jobs: jobs.log("digits-1")):
        with pytest.raises(kind):
            ask(Jobs(Client(error)))


def test_a_rejection_is_one_line_without_a_traceback() -> None:
    with pytest.raises(ResourceError) as caught:
        Jobs(Client(RuntimeError(f"Request failed with status code 500: {REFUSED}."))).submit(JOB)
    assert caught.value.value == "ValueError: Job with submission_id digits-1 already exists"


@pytest.mark.parametrize("error", [RuntimeError("WebSocket connection closed unexpectedly"), aiohttp.ClientError("gone")])
def test_a_stream_that_breaks_off_is_no_answer(error: Exception) -> None:
    found: list[str] = []

    async def read() -> None:
        async for piece in Jobs(Client(error)).tail("digits-1"):
            found.append(piece)

    with pytest.raises(NoAnswerError):
        asyncio.run(read())
    assert found == ["a piece"]


def test_an_address_without_a_cluster_is_a_four_part_error() -> None:
    with pytest.raises(ConfigError) as caught:
        connect("http://127.0.0.1:1")
    check("errors/submit_no_answer.txt", f"{caught.value}\n")


def test_a_missing_token_is_a_four_part_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str | None) -> Any:
        raise AuthenticationError("Authentication required: Unauthorized: Missing authentication token\n\nmore words")

    monkeypatch.setattr(module, "JobSubmissionClient", refuse)
    with pytest.raises(ConfigError) as caught:
        connect("http://127.0.0.1:8265")
    check("errors/submit_no_token.txt", f"{caught.value}\n")


def test_each_request_has_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []

    class Asked:
        def __init__(self, address: str | None) -> None:
            pass

        def _do_request(self, method: str, endpoint: str, **named: Any) -> None:
            limits.append(named["timeout"])
            raise requests.ReadTimeout("slow")

        def get_job_logs(self, name: str) -> None:
            self._do_request("GET", name)

    monkeypatch.setattr(module, "JobSubmissionClient", Asked)
    with pytest.raises(NoAnswerError):
        connect(None).log("digits-1")
    assert limits == [(module.CONNECT_TIMEOUT_S, module.READ_TIMEOUT_S)]


SHELL = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "TORCH_LOGS": "x", "HOME": "/h", "TOKEN": "s3cret", "MINE": "1"}
LIBRARIES = {name: SHELL[name] for name in ("NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "TORCH_LOGS")}


@pytest.mark.parametrize(
    ("assignments", "arguments", "more"),
    [
        *(("", "--lr 1", {}), ("", "--run.forward-env MINE,ABSENT", {"MINE": "1"})),
        ("", "--run.forward-env=MINE,TOKEN --lr 1", {"MINE": "1", "TOKEN": "s3cret"}),
        ("", "--run.forward-env MINE --run.forward-env TOKEN", {"MINE": "1", "TOKEN": "s3cret"}),
        ("", '--run.forward-env ["MINE","TOKEN"]', {"MINE": "1", "TOKEN": "s3cret"}),
        ("", "--lr 1 --run.forward-env", {}),
        ("A=1,2 EMPTY= B=x=y TOKEN", "", {"A": "1,2", "EMPTY": "", "B": "x=y", "TOKEN": "s3cret"}),
        ("NCCL_DEBUG=WARN", "", {"NCCL_DEBUG": "WARN"}),
    ],
)
def test_r18_a_job_gets_the_variables_of_libraries_and_those_named(
    assignments: str, arguments: str, more: dict[str, str]
) -> None:
    found = forwarded_env(SHELL, assignments.split(), arguments.split(), "/home/me")
    assert found == {SUBMIT_DIRECTORY: "/home/me"} | LIBRARIES | more


@pytest.mark.parametrize(("word", "value"), [("NOPE", "NOPE"), ("=s3cret", "no name"), ("", "no name")])
def test_a_variable_that_is_not_set_is_refused_without_a_value(word: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        forwarded_env(SHELL, [word], [], "/home/me")
    assert (caught.value.where, caught.value.value) == ("--env", value)
    assert "s3cret" not in str(caught.value)
