"""The calls of workers that wait for a generation, in the rendezvous' process: each is answered once.

One task looks whether something can form, so that a thousand who wait cost no more than one look at a time. What may
form is decided by its owner.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from raytrain.rendezvous.generation import Entrant, Generation

LOOK_EVERY_S = 0.02

Reply = tuple[bool, Generation | None]
"""Whether a call is to be answered, and with what."""


class Door:
    """Keeps the calls.

    Args:
        form: forms what can be formed now; returns whether somebody who waits has to be answered.
        reply: what to say to an entrant.
    """

    def __init__(self, form: Callable[[], bool], reply: Callable[[Entrant], Reply]) -> None:
        self._form, self._reply = form, reply
        self._calls: dict[str, tuple[Entrant, asyncio.Future[Generation | None]]] = {}
        self._news = asyncio.Event()
        self._has_answers = False
        self._keeper: asyncio.Task[None] | None = None

    async def wait(self, entrant: Entrant) -> Generation | None:
        """Blocks until there is an answer for this very arrival."""
        before = self._calls.pop(entrant.worker, None)
        if before is not None:  # its call was lost on the way, and it has called again
            _answer(before[1], self._reply(before[0])[1])
        call: asyncio.Future[Generation | None] = asyncio.get_running_loop().create_future()
        self._calls[entrant.worker] = entrant, call
        self._has_answers |= self._reply(entrant)[0]
        self._tell_news()
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.create_task(self._keep())
            self._keeper.add_done_callback(self._pass_failure_on)
        return await call

    def change(self) -> None:
        """Something has happened that some may have to be told, or that lets others form a generation."""
        self._has_answers = True
        self._tell_news()

    async def news(self, limit_s: float) -> None:
        """Returns when something has changed, or after so many seconds."""
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(self._news.wait(), limit_s)

    def _tell_news(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _keep(self) -> None:
        while self._calls:
            if self._form():
                self.change()
            if self._has_answers:
                self._has_answers = False
                self._answer_all()
            if self._calls:
                await self.news(LOOK_EVERY_S)

    def _answer_all(self) -> None:
        for worker, (entrant, call) in list(self._calls.items()):
            is_due, generation = self._reply(entrant)
            if is_due:
                del self._calls[worker]
                _answer(call, generation)

    def _pass_failure_on(self, keeper: asyncio.Task[None]) -> None:
        """Nobody may wait for ever for a task that has failed."""
        failure = None if keeper.cancelled() else keeper.exception()
        if failure is None:
            return
        for _, call in self._calls.values():
            if not call.done():
                call.set_exception(failure)
        self._calls.clear()


def _answer(call: asyncio.Future[Generation | None], generation: Generation | None) -> None:
    if not call.done():
        call.set_result(generation)
