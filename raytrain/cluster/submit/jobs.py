"""The jobs of a cluster, as its dashboard tells of them: submit one, ask for it, read its log.

Wraps Ray's `JobSubmissionClient`, whose errors are texts: here they become "does not answer", "does not know this job",
or an error that the user can mend. Each request has a limit in time. Runs where the job is submitted.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from raytrain.errors import ConfigError, RaytrainError, ResourceError

CONNECT_LIMIT_S = 5.0
ANSWER_LIMIT_S = 60.0
"""A dashboard that just started waits for some of its parts before it answers."""
_STATUS = re.compile(r"status code (\d{3})")
_ANSWER = re.compile(r"^Request failed with status code \d{3}: ")


@dataclass(frozen=True)
class Job:
    """What is submitted.

    Args:
        name: its submission id.
        entrypoint: shell command.
        runtime_env: with the working directory, what is left out of it, and variables.
    """

    name: str
    entrypoint: str
    runtime_env: Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """What a cluster tells of a job.

    Args:
        status: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED.
        driver_exit_code: of the driver, if it is known.
        error_type: why it FAILED.
        message: the cluster's own words.
    """

    status: str
    driver_exit_code: int | None = None
    error_type: str = ""
    message: str = ""

    @property
    def is_over(self) -> bool:
        return bool(JobStatus(self.status).is_terminal())


class NoAnswerError(RaytrainError):
    """The cluster does not answer, or not as it should: worth asking again."""


class UnknownJobError(RaytrainError):
    """The cluster answers, and has no such job: it is not the one to which the job was submitted."""


class Jobs:
    """The jobs of one cluster.

    Args:
        client: of Ray.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def submit(self, job: Job) -> None:
        """Uploads the working directory if the cluster does not have it, and submits.

        Raises:
            NoAnswerError: the cluster does not answer.
            ResourceError: it refuses.
        """
        with _told():
            self._client.submit_job(entrypoint=job.entrypoint, submission_id=job.name, runtime_env=dict(job.runtime_env))

    def state(self, name: str) -> State:
        """Raises NoAnswerError or UnknownJobError."""
        with _told():
            info = self._client.get_job_info(name)
        return State(JobStatus(info.status).value, info.driver_exit_code, info.error_type or "", info.message or "")

    def log(self, name: str) -> str:
        """All of it. Raises NoAnswerError or UnknownJobError."""
        with _told():
            return str(self._client.get_job_logs(name))

    async def tail(self, name: str) -> AsyncIterator[str]:
        """The log from its beginning, piece by piece, until the job ends. Raises NoAnswerError where it breaks off."""
        with _told():
            async for text in self._client.tail_job_logs(name):
                yield text


def connect(address: str | None) -> Jobs:
    """The jobs of the cluster at an address.

    Args:
        address: of its dashboard, http://HOST:8265; or what `ray.init` takes. None for a Ray on this machine.

    Raises:
        ConfigError: nobody answers there, or not without a token.
    """
    for name in ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env"):
        logging.getLogger(name).setLevel(logging.ERROR)  # what they would say is said already
    where, fix = "--address", "give the address of the cluster's dashboard, for example http://HOST:8265"
    try:
        with _told():
            return Jobs(_with_limits(address))
    except (NoAnswerError, UnknownJobError) as error:
        rule = "is the address of a Ray cluster that can be reached from here"
        raise ConfigError(where, f"{address or 'a Ray on this machine'}: {error}", rule, fix) from None


def _with_limits(address: str | None) -> Any:
    """Ray's client, which sets no limits of its own."""
    client = JobSubmissionClient(address)
    plain = client._do_request

    def do_request(*arguments: Any, **named: Any) -> Any:
        return plain(*arguments, **{"timeout": (CONNECT_LIMIT_S, ANSWER_LIMIT_S), **named})

    client._do_request = do_request
    return client


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Raises errors of ours for those of Ray's client."""
    try:
        yield
    except AuthenticationError as error:
        raise _no_token(error) from None
    except (aiohttp.ClientError, requests.RequestException, OSError) as error:
        raise NoAnswerError(_gist(error)) from None
    except (RuntimeError, ValueError) as error:
        raise _of_status(error) from None


def _of_status(error: Exception) -> RaytrainError:
    """The error for an answer that Ray's client did not like."""
    found, words = _STATUS.search(str(error)), _gist(error)
    status = int(found[1]) if found else 0
    if status == 404:
        return UnknownJobError(words)
    if 400 <= status < 500 or words.startswith("ValueError: "):
        return ResourceError("the cluster", words, "takes the job", "change what it refuses, and submit again")
    return NoAnswerError(words)


def _no_token(error: Exception) -> ConfigError:
    value = _gist(error)
    rule = "the cluster asks for the token that it was started with"
    fix = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or put the token into ~/.ray/auth_token"
    return ConfigError("RAY_AUTH_TOKEN", value, rule, fix)


def _gist(error: Exception) -> str:
    """One line of an error: its first one, or the last one of a traceback that the cluster has sent."""
    lines = _ANSWER.sub("", str(error)).strip(" .\n").splitlines() or [type(error).__name__]
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]
