"""One training as jobs on a cluster: submitted, followed, and submitted again when the cluster was lost.

A job is submitted again only after its cluster or its driver's node is gone, never after a failure of its own code or a
stop. Its arguments and its storage are the same, so that the run goes on from its newest checkpoint.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raytrain.cluster.submit.follow import ASK_EVERY_S, Ending, Follower, Tail
from raytrain.cluster.submit.jobs import Job, NoAnswerError, UnknownJobError


def exit_code(ending: Ending) -> int:
    """0 succeeded; the driver's own code if it failed, 128 + signal if one ended it, 1 if not known; 143 if stopped."""
    if ending.kind != "ended":
        return 1
    code = {"SUCCEEDED": 0, "STOPPED": 128 + signal.SIGTERM}.get(ending.state.status, ending.state.driver_exit_code or 1)
    return 128 - code if code < 0 else code


def last_words(name: str, ending: Ending) -> str:
    """What is said of a job that is not submitted again."""
    state = ending.state
    if ending.kind == "silent":
        return f"{name}: the cluster did not answer any more ({ending.cause}); the job may go on"
    if ending.kind == "lost":
        return f"{name}: lost with its cluster ({ending.cause}); submitted again, its run goes on from its checkpoint"
    if state.status != "FAILED":
        return f"{name}: {state.status.lower()}"
    if state.driver_exit_code is None:
        return f"{name}: failed before it ran: {state.message}"
    return f"{name}: failed with exit code {exit_code(ending)}"


class Campaign:
    """Follows a job, and submits it again.

    Args:
        jobs: of the cluster: `Jobs`.
        name: submission id of the job, which has been submitted.
        job: what to submit again; None to follow only.
        retries: how many times.
        limit_s: seconds for which a cluster that does not answer is waited for.
        show: takes each line of the log.
        say: takes what is to be said besides.
        clock, sleep: monotonic time, and waiting, in seconds.
    """

    def __init__(
        self,
        jobs: Any,
        name: str,
        job: Job | None,
        retries: int,
        limit_s: float,
        show: Callable[[str], None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._jobs, self.name, self._job, self._retries, self._limit_s = jobs, name, job, retries, limit_s
        self._show, self._say, self._clock, self._sleep = show, say, clock, sleep

    def run(self) -> int:
        """Returns the exit code.

        Raises:
            FourPartError: the cluster refuses the job.
            NoAnswerError: it took the job once, and does not take it again.
        """
        for left in range(self._retries if self._job else 0, -1, -1):
            ending = Follower(self._jobs, self.name, Tail(self._show), self._say, self._limit_s, self._clock).follow()
            if ending.kind != "lost" or not left or self._job is None:
                break
            self._job = replace(self._job, name=again(self._job.name))
            self.name = self._job.name
            self._say(f"lost with its cluster ({ending.cause}); submitting it again as {self.name}")
            self._submit_again(self._job)
        self._say(last_words(self.name, ending))
        return exit_code(ending)

    def _submit_again(self, job: Job) -> None:
        until = self._clock() + self._limit_s
        while True:
            try:
                self._jobs.submit(job)
            except NoAnswerError:
                if self._is_known(job.name):
                    return
                if self._clock() > until:
                    raise
                self._sleep(ASK_EVERY_S)
            else:
                return

    def _is_known(self, name: str) -> bool:
        """Whether the cluster took the job, and just its answer was lost."""
        try:
            self._jobs.state(name)
        except (NoAnswerError, UnknownJobError):
            return False
        return True


def again(name: str) -> str:
    """The submission id after another: 'digits' -> 'digits-2' -> 'digits-3'; a cluster takes each of them once."""
    stem, dash, number = name.rpartition("-")
    return f"{stem}-{int(number) + 1}" if dash and number.isdecimal() and len(number) < 3 else f"{name}-2"
