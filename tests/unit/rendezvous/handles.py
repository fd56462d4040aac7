"""What stands in for Ray in the tests of the rendezvous."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

LIMIT_S = 20.0
Answer = TypeVar("Answer")


class Handle:
    """What the rendezvous knows of a worker: `execute.remote(int)`, which fails if its process is gone."""

    def __init__(self, error: Exception | None = None, is_stuck: bool = False) -> None:
        self.error, self.is_stuck = error, is_stuck
        self.execute = SimpleNamespace(remote=self._execute)

    async def _execute(self, function: Any) -> Any:
        if self.is_stuck:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return function()


def run(story: Coroutine[Any, Any, Answer]) -> Answer:
    return asyncio.run(asyncio.wait_for(story, LIMIT_S))
