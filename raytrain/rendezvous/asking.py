"""Who of those who train or wait is dead? Asked of their processes while somebody waits, in the rendezvous' process.

It decides nothing: whom it finds dead it names to its owner.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from ray.exceptions import GetTimeoutError, RayActorError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
EACH_S = 0.0005
"""Pause for each worker that is asked: a thousand of them are asked twice a second at most."""


class Asking:
    """Asks in rounds, quickly after an arrival, then less often.

    Args:
        whom: names those whose death matters now; nobody once nobody waits.
        handles: of Ray Train workers, by name; others are not asked.
        lose: is told who is dead.
    """

    def __init__(self, whom: Callable[[], list[str]], handles: dict[str, Any], lose: Callable[[str], None]) -> None:
        self._whom, self._handles, self._lose = whom, handles, lose
        self._arrived = asyncio.Event()
        self._rounds: asyncio.Task[None] | None = None

    def hurry(self) -> None:
        """Somebody has arrived, perhaps since it has lost a peer."""
        self._arrived.set()
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.create_task(self._ask_around())

    async def _ask_around(self) -> None:
        pause_s = FIRST_PAUSE_S
        while workers := self._whom():
            known = [worker for worker in workers if worker in self._handles]
            answers = await asyncio.gather(*(is_alive(self._handles[worker]) for worker in known))
            for worker, alive in zip(known, answers, strict=True):
                if not alive:
                    self._lose(worker)
            pause_s = FIRST_PAUSE_S if self._arrived.is_set() else min(2 * pause_s, LONGEST_PAUSE_S)
            self._arrived.clear()
            least_s = EACH_S * len(known)
            await asyncio.sleep(least_s)
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), max(0.0, pause_s - least_s))


async def is_alive(handle: Any) -> bool:
    """Whether the process of a Ray Train worker lives.

    A member that Ray calls unavailable (for seconds, after its node died) is left out at once: that is safe, since if it
    comes back it enters again as a newcomer.
    """
    try:
        await asyncio.wait_for(handle.execute.remote(int), 0.5)
    except RayActorError:
        return False
    except (asyncio.TimeoutError, TimeoutError, GetTimeoutError):
        return True  # busy, not dead
    return True
