"""What stands in for Ray in the tests of the rendezvous."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

LIMIT_S = 20.0


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


def story(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an asynchronous test for a limited time."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), LIMIT_S))

    return run
