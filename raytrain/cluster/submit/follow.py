"""The log of a job, shown as whole lines while the job goes on, through lost connections, until it has ended.

The cluster streams the log from its beginning each time that one asks; what has been shown already is skipped. The stream
alone does not say whether the cluster still lives, so it is asked for the job's state as well whenever the log is quiet.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from raytrain.cluster.submit.jobs import NoAnswerError, State, UnknownJobError
from raytrain.units import format_seconds

ASK_EVERY_S = 1.0
"""While the cluster does not answer."""
QUIET_S = 5.0
"""Without a new line in the log, after which the state of the job is asked for."""
LOST = "JOB_SUPERVISOR_ACTOR_DIED"
"""The type of a failure where the driver's node was lost; nothing is said against the driver's own code."""


class Source(Protocol):
    """Where a job's state and log come from: `Jobs`."""

    def state(self, name: str) -> State:
        """Raises NoAnswerError or UnknownJobError."""

    def log(self, name: str) -> str:
        """All of it."""

    def tail(self, name: str) -> AsyncIterator[str]:
        """From the beginning, piece by piece."""


@dataclass(frozen=True)
class Ending:
    """How following came to its end.

    Args:
        kind: "ended" with the job, "lost" with its cluster, or "silent" where the cluster did not answer for too long.
        state: the last one that is known.
        cause: of "lost" and "silent".
    """

    kind: str
    state: State
    cause: str = ""


class Tail:
    """A log as whole lines, each of them once, although it comes from its beginning again and again.

    Args:
        show: takes a line, without its end.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._known = self._skip = 0  # characters
        self._part = ""

    def begin(self) -> None:
        """What comes next is the beginning of the log."""
        self._skip = self._known

    def take(self, text: str) -> None:
        """Shows what is new in the next piece."""
        new, self._skip = text[self._skip :], max(0, self._skip - len(text))
        self._known += len(new)
        *lines, self._part = (self._part + new).split("\n")
        for line in lines:
            self._show(line)

    def end(self) -> None:
        """Shows the last line, if it has no end."""
        if self._part:
            self._show(self._part)
        self._part = ""


class Follower:
    """Follows one job.

    Args:
        source: of state and log.
        name: submission id.
        tail: shows the log.
        say: is told of lost connections.
        limit_s: seconds for which a cluster that does not answer is waited for.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        tail: Tail,
        say: Callable[[str], None],
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._name, self._tail, self._say = source, name, tail, say
        self._limit_s, self._clock = limit_s, clock
        self._state, self._heard = State("PENDING"), 0.0

    def follow(self) -> Ending:
        """Shows the log until the job has ended, or its cluster is gone."""
        try:
            return asyncio.run(self._follow())
        except UnknownJobError:
            cause = "the cluster does not know the job, so it is another one than before"
            return Ending("lost", self._state, cause)

    async def _follow(self) -> Ending:
        while True:
            try:
                await self._show_stream()
                if self._ask().is_over:
                    return self._ended()
            except NoAnswerError as error:
                if silent := await self._wait_for_answer(error):
                    return silent
            await asyncio.sleep(ASK_EVERY_S)

    def _ask(self) -> State:
        self._state = self._source.state(self._name)
        return self._state

    async def _show_stream(self) -> None:
        """Shows what the stream brings, until it ends. Raises NoAnswerError if it breaks off, or the cluster is silent."""
        tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._look_when_quiet())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> None:
        self._tail.begin()
        async for text in self._source.tail(self._name):
            self._heard = self._clock()
            self._tail.take(text)

    async def _look_when_quiet(self) -> None:
        """Asks for the job's state while no line comes; returns if the job is over and the stream does not say so."""
        self._heard, was_over = self._clock(), False
        while not was_over:
            await asyncio.sleep(QUIET_S)
            if self._clock() - self._heard >= QUIET_S:
                was_over = self._ask().is_over

    async def _wait_for_answer(self, error: NoAnswerError) -> Ending | None:
        """Asks until the cluster answers; what it has come to if it never does."""
        since, is_said = self._clock(), False
        while self._clock() - since < self._limit_s:
            try:
                self._ask()
            except NoAnswerError as now:
                error = now
            else:
                if is_said:
                    self._say("the cluster answers again")
                return None
            if not is_said:
                self._say(f"the cluster does not answer ({error}); asking it again for {format_seconds(self._limit_s)}")
                is_said = True
            await asyncio.sleep(ASK_EVERY_S)
        return Ending("silent", self._state, str(error))

    def _ended(self) -> Ending:
        with contextlib.suppress(NoAnswerError, UnknownJobError):  # the stream has brought all, or all but what came last
            self._tail.begin()
            self._tail.take(self._source.log(self._name))
        self._tail.end()
        is_lost = self._state.driver_exit_code is None and self._state.error_type == LOST
        return Ending("lost" if is_lost else "ended", self._state, self._state.message)
