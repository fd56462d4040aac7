"""Submits jobs to a cluster's dashboard, and reads their state and log. Runs where the job is submitted.

Wraps Ray's `JobSubmissionClient`, whose errors are texts: here they become "does not answer", "does not know this job",
or an error that the user can fix. Each request has a timeout. A job gets the environment variables of `forwarded_env` in its
runtime_env, so that the driver and all workers have them.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from raytrain.elastic.environment import SUBMIT_DIRECTORY, forwarded
from raytrain.errors import ConfigError, RaytrainError, ResourceError

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
"""A dashboard that just started waits for some of its parts before it answers."""
FORWARD_ENV = "--run.forward-env"
_STATUS = re.compile(r"status code (\d{3})")
_ANSWER = re.compile(r"^Request failed with status code \d{3}: ")


@dataclass(frozen=True)
class Job:
    """What is submitted.

    Args:
        name: submission id.
        entrypoint: shell command.
        runtime_env: working directory, excludes and variables.
    """

    name: str
    entrypoint: str
    runtime_env: Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """A job's state on the cluster.

    Args:
        status: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED.
        driver_exit_code: None if not known.
        error_type: why it FAILED.
        message: from the cluster.
    """

    status: str
    driver_exit_code: int | None = None
    error_type: str = ""
    message: str = ""

    @property
    def is_over(self) -> bool:
        return bool(JobStatus(self.status).is_terminal())


class NoAnswerError(RaytrainError):
    """The cluster does not answer, or not as it should; a retry may help."""


class UnknownJobError(RaytrainError):
    """The cluster answers but has no such job: it is not the cluster to which the job was submitted."""


class Jobs:
    """The jobs of one cluster, through Ray's client."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def submit(self, job: Job) -> None:
        """Uploads the working directory if the cluster does not have it, and submits.

        Raises:
            NoAnswerError: the cluster does not answer.
            ResourceError: it rejects the job.
        """
        with _translated_errors():
            self._client.submit_job(entrypoint=job.entrypoint, submission_id=job.name, runtime_env=dict(job.runtime_env))

    def state(self, name: str) -> State:
        """Raises NoAnswerError or UnknownJobError."""
        with _translated_errors():
            info = self._client.get_job_info(name)
        return State(JobStatus(info.status).value, info.driver_exit_code, info.error_type or "", info.message or "")

    def log(self, name: str) -> str:
        """The whole log. Raises NoAnswerError or UnknownJobError."""
        with _translated_errors():
            return str(self._client.get_job_logs(name))

    async def tail(self, name: str) -> AsyncIterator[str]:
        """The log from its beginning, in chunks, until the job ends. Raises NoAnswerError where it breaks off."""
        with _translated_errors():
            async for text in self._client.tail_job_logs(name):
                yield text


def connect(address: str | None) -> Jobs:
    """The jobs of the cluster at an address.

    Args:
        address: of its dashboard, http://HOST:8265; or what `ray.init` takes. None for a Ray on this machine.

    Raises:
        ConfigError: nobody answers there, or it requires a token.
    """
    for name in ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they repeat what submit prints
    try:
        with _translated_errors():
            return Jobs(_client_with_timeouts(address))
    except (NoAnswerError, UnknownJobError) as error:
        rule = "is the address of a Ray cluster that can be reached from here"
        fix = "give the address of the cluster's dashboard, for example http://HOST:8265"
        raise ConfigError("--address", f"{address or 'a Ray on this machine'}: {error}", rule, fix) from None


def _client_with_timeouts(address: str | None) -> Any:
    """Ray's client, which sets no timeouts of its own."""
    client = JobSubmissionClient(address)
    request = client._do_request

    def do_request(*arguments: Any, **named: Any) -> Any:
        return request(*arguments, **{"timeout": (CONNECT_TIMEOUT_S, READ_TIMEOUT_S), **named})

    client._do_request = do_request
    return client


@contextlib.contextmanager
def _translated_errors() -> Iterator[None]:
    """Raises raytrain's errors instead of those of Ray's client."""
    try:
        yield
    except AuthenticationError as error:
        fix = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or put the token into ~/.ray/auth_token"
        raise ConfigError("RAY_AUTH_TOKEN", _gist(error), "the cluster requires its token", fix) from None
    except (aiohttp.ClientError, requests.RequestException, OSError) as error:
        raise NoAnswerError(_gist(error)) from None
    except (RuntimeError, ValueError) as error:
        raise _of_status(error) from None


def _of_status(error: Exception) -> RaytrainError:
    """The error for an answer that Ray's client rejects."""
    found, words = _STATUS.search(str(error)), _gist(error)
    status = int(found[1]) if found else 0
    if status == 404:
        return UnknownJobError(words)
    if 400 <= status < 500 or words.startswith("ValueError: "):
        return ResourceError("the cluster", words, "must accept the job", "change what it rejects, and submit again")
    return NoAnswerError(words)


def _gist(error: Exception) -> str:
    """One line of an error: the first one, or the last one of a traceback from the cluster."""
    lines = _ANSWER.sub("", str(error)).strip(" .\n").splitlines() or [type(error).__name__]
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]


def forwarded_env(
    environment: Mapping[str, str], assignments: Sequence[str], arguments: Sequence[str], directory: str
) -> dict[str, str]:
    """The variables of a job: those of NCCL, gloo, PyTorch and OpenMP, those that the run forwards, and those of --env.

    Args:
        environment: of the shell.
        assignments: of --env: NAME=VALUE, or NAME for the shell's own value.
        arguments: of the job; what --run.forward-env names is forwarded if the shell has it.
        directory: the shell's, to which relative paths refer.

    Raises:
        ConfigError: a NAME is not set in the shell; the message shows no value.
    """
    found = {SUBMIT_DIRECTORY: directory} | forwarded(environment, forward_env_names(arguments))
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name or (not equals and name not in environment):
            rule, fix = "is NAME=VALUE, or the NAME of a variable that is set in this shell", name or "NAME"
            raise ConfigError("--env", name or "no name", rule, f"export {fix} first, or write {fix}=VALUE")
        found[name] = value if equals else environment[name]
    return found


def forward_env_names(arguments: Sequence[str]) -> list[str]:
    """Names after --run.forward-env, written as `A,B` or `["A", "B"]`, in one word with the flag or in two."""
    names: list[str] = []
    for word, following in pairwise([*arguments, ""]):
        flag, equals, value = word.partition("=")
        if flag == FORWARD_ENV:
            names += (value if equals else following).strip("[]").split(",")
    return [stripped for name in names if (stripped := name.strip().strip("\"'"))]
