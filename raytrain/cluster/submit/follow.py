"""Follows a job to its end: shows its log, waits while the cluster does not answer, submits it again if the cluster is lost.

The cluster streams the log from the beginning on each connection; lines that were shown are skipped. While the log is quiet
the cluster is asked for the job's state, since the stream alone does not show whether it is alive. A job is submitted again
only after its cluster or its driver's node is lost, never after a failure of its own code or a stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from raytrain.cluster.submit.jobs import Job, NoAnswerError, State, UnknownJobError
from raytrain.units import format_seconds

RETRY_EVERY_S = 1.0
"""While the cluster does not answer."""
QUIET_S = 5.0
"""Without a new line in the log, after which the state of the job is requested."""
DRIVER_NODE_LOST = "JOB_SUPERVISOR_ACTOR_DIED"
"""Ray's error type where the driver's node was lost; the driver's own code did not fail."""


@dataclass(frozen=True)
class Ending:
    """How following ended: the job has ended, its cluster is lost, or the cluster did not answer for too long ("silent").

    Args:
        state: the last known one.
        cause: of "lost" and "silent".
    """

    kind: Literal["ended", "lost", "silent"]
    state: State
    cause: str = ""


class JobRunner:
    """Follows a job that was submitted, and submits it again when its cluster is lost.

    Args:
        jobs: of the cluster: `Jobs`.
        name: submission id.
        job: to submit again with the same arguments, so that its run resumes; None to follow only.
        retries: how many times it may be submitted again.
        timeout_s: how long a cluster that does not answer is waited for.
        show: receives each line of the log.
        report: receives messages besides.
    """

    def __init__(
        self,
        jobs: Any,
        name: str,
        job: Job | None,
        retries: int,
        timeout_s: float,
        show: Callable[[str], None],
        report: Callable[[str], None],
    ) -> None:
        self._jobs, self.name, self._job, self._retries, self._timeout_s = jobs, name, job, retries, timeout_s
        self._show, self._report = show, report

    def run(self) -> int:
        """Returns the exit code.

        Raises:
            FourPartError: the cluster rejects the job.
            NoAnswerError: it does not accept the job again.
        """
        for left in range(self._retries if self._job else 0, -1, -1):
            ending = Follower(self._jobs, self.name, LineBuffer(self._show), self._report, self._timeout_s).follow()
            if ending.kind != "lost" or not left or self._job is None:
                break
            self._job = replace(self._job, name=next_name(self._job.name))
            self.name = self._job.name
            self._report(f"lost with its cluster ({ending.cause}); submitting it again as {self.name}")
            _retrying(Retrying, self._timeout_s)(self._submit, self._job)
        self._report(final_message(self.name, ending))
        return exit_code(ending)

    def _submit(self, job: Job) -> None:
        try:
            self._jobs.submit(job)
        except NoAnswerError as error:
            try:
                self._jobs.state(job.name)  # it may have accepted the job although its answer was lost
            except (NoAnswerError, UnknownJobError):
                raise error from None


def _retrying(kind: Any, timeout_s: float, **more: Any) -> Any:
    wait, stop = wait_fixed(RETRY_EVERY_S), stop_after_delay(timeout_s)
    return kind(retry=retry_if_exception_type(NoAnswerError), wait=wait, stop=stop, reraise=True, **more)


def next_name(name: str) -> str:
    """The submission id after another: 'digits' -> 'digits-2' -> 'digits-3'; a cluster accepts each once."""
    stem, dash, number = name.rpartition("-")
    return f"{stem}-{int(number) + 1}" if dash and number.isdecimal() and len(number) < 3 else f"{name}-2"


def exit_code(ending: Ending) -> int:
    """0 succeeded; the driver's own code if it failed, 128 + signal if one ended it, 1 if not known; 143 if stopped."""
    if ending.kind != "ended":
        return 1
    code = {"SUCCEEDED": 0, "STOPPED": 128 + signal.SIGTERM}.get(ending.state.status, ending.state.driver_exit_code or 1)
    return 128 - code if code < 0 else code


def final_message(name: str, ending: Ending) -> str:
    """The message for a job that is not submitted again."""
    state = ending.state
    if ending.kind == "silent":
        return f"{name}: the cluster stopped answering ({ending.cause}); the job may still be running"
    if ending.kind == "lost":
        return f"{name}: lost with its cluster ({ending.cause}); submit it again to resume its run from the checkpoint"
    if state.status != "FAILED":
        return f"{name}: {state.status.lower()}"
    if state.driver_exit_code is None:
        return f"{name}: failed before it ran: {state.message}"
    return f"{name}: failed with exit code {exit_code(ending)}"


class LineBuffer:
    """Shows a log as whole lines, each once, although it arrives from the beginning again and again.

    Args:
        show: receives a line, without its newline.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._known = self._skip = 0  # characters
        self._part = ""

    def restart(self) -> None:
        """The next chunk is the beginning of the log."""
        self._skip = self._known

    def feed(self, text: str) -> None:
        """Shows the new lines of the next chunk."""
        new, self._skip = text[self._skip :], max(0, self._skip - len(text))
        self._known += len(new)
        *lines, self._part = (self._part + new).split("\n")
        for line in lines:
            self._show(line)

    def flush(self) -> None:
        """Shows the last line if it has no newline."""
        if self._part:
            self._show(self._part)
        self._part = ""


class Follower:
    """Shows the log of one job until it ends, through lost connections.

    Args:
        jobs: of the cluster: `Jobs`.
        name: submission id.
        lines: shows the log.
        report: receives messages about lost connections.
        timeout_s: how long a cluster that does not answer is waited for.
    """

    def __init__(self, jobs: Any, name: str, lines: LineBuffer, report: Callable[[str], None], timeout_s: float) -> None:
        self._jobs, self._name, self._lines, self._report, self._timeout_s = jobs, name, lines, report, timeout_s
        self._state, self._last_chunk_s = State("PENDING"), 0.0

    def follow(self) -> Ending:
        """Returns when the job has ended, or its cluster is gone."""
        try:
            return asyncio.run(self._follow())
        except UnknownJobError:
            return Ending("lost", self._state, "the cluster does not know the job, so it is another one than before")

    async def _follow(self) -> Ending:
        while True:
            try:
                await self._show_stream()
                if self._fetch_state().is_over:
                    return self._ended()
            except NoAnswerError as error:
                if silent := await self._wait_for_answer(error):
                    return silent
            await asyncio.sleep(RETRY_EVERY_S)

    def _fetch_state(self) -> State:
        self._state = self._jobs.state(self._name)
        return self._state

    async def _show_stream(self) -> None:
        """Shows what the stream brings, until it ends. Raises NoAnswerError if it breaks off, or the cluster is silent."""
        tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._poll_when_quiet())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> None:
        self._lines.restart()
        async for text in self._jobs.tail(self._name):
            self._last_chunk_s = time.monotonic()
            self._lines.feed(text)

    async def _poll_when_quiet(self) -> None:
        """Requests the job's state while no line arrives; returns if the job is over and the stream does not say so."""
        self._last_chunk_s, is_over = time.monotonic(), False
        while not is_over:
            await asyncio.sleep(QUIET_S)
            if time.monotonic() - self._last_chunk_s >= QUIET_S:
                is_over = self._fetch_state().is_over

    async def _wait_for_answer(self, error: NoAnswerError) -> Ending | None:
        """Retries until the cluster answers; returns an ending if it does not."""
        limit, reported = format_seconds(self._timeout_s), False

        def report_once(retry: RetryCallState) -> None:
            nonlocal reported
            if not reported:
                cause = retry.outcome.exception() if retry.outcome else error
                self._report(f"the cluster does not answer ({cause}); retrying for {limit}")
            reported = True

        try:
            async for attempt in _retrying(AsyncRetrying, self._timeout_s, before_sleep=report_once):
                with attempt:
                    self._fetch_state()
        except NoAnswerError as last:
            return Ending("silent", self._state, str(last))
        if reported:
            self._report("the cluster answers again")
        return None

    def _ended(self) -> Ending:
        with contextlib.suppress(NoAnswerError, UnknownJobError):  # the stream has brought all but perhaps the last lines
            self._lines.restart()
            self._lines.feed(self._jobs.log(self._name))
        self._lines.flush()
        is_lost = self._state.driver_exit_code is None and self._state.error_type == DRIVER_NODE_LOST
        return Ending("lost" if is_lost else "ended", self._state, self._state.message)
