"""The rendezvous as a Ray actor: waits, asks after missing members, and answers the workers' calls.

One per run, in a process of its own on the driver's node, without CPUs. All decisions are made by `state.Rendezvous`;
this file only knows time and how to find out whether a worker's process is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import ray
import ray.train  # the handles of workers need it, and the first one should not wait for it
from ray.exceptions import GetTimeoutError, RayActorError

from raytrain.rendezvous.state import NOBODY, Entrant, Generation, Rendezvous

CHECK_EVERY_S = 0.02
ASK_AT_LEAST_EVERY_S = 0.5
WATCH_S = 10.0


class RendezvousActor:
    """Runs as an asyncio actor, so that any number of workers can wait in it.

    Args:
        min_workers: the smallest generation.
        patience_s: how long members wait at the door for one that lives but does not come, before it is killed.
    """

    def __init__(self, min_workers: int, patience_s: float = 60.0) -> None:
        self._state = Rendezvous(min_workers, patience_s=patience_s)
        self._handles: dict[str, Any] = {}
        self._changed = asyncio.Condition()
        self._asking: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()

    async def start(self, worker: str) -> None:
        async with self._changed:
            self._state.start(worker)

    async def lose(self, worker: str) -> None:
        """The process of `worker` is gone."""
        async with self._changed:
            self._state.lose(worker)
            self._changed.notify_all()

    async def enter(self, entrant: Entrant, handle: Any) -> Generation | None:
        """Blocks until a generation with this worker forms; None when the run is over.

        Returns NOBODY if the worker was taken for dead while it waited. Nobody enters again in its name, since the call of a
        worker that is really dead waits here like any other.
        """
        async with self._changed:
            self._handles[entrant.worker] = handle
            self._state.enter(entrant, time.monotonic())
            self._changed.notify_all()
            self._arrived.set()
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask_around())
            while self._state.is_waiting(entrant) and not self._state.closed:
                if self._state.form(time.monotonic()) is None:
                    await self._wait(CHECK_EVERY_S)
                else:
                    self._changed.notify_all()
            if self._state.closed:
                return None
            return self._state.generation if self._state.has_admitted(entrant) else NOBODY

    async def watch(self, generation: int) -> tuple[bool, bool]:
        """Blocks, for some seconds at most, until members of `generation` should come to the door or stop.

        Returns:
            whether newcomers wait, and whether a stop was asked for.
        """
        until = time.monotonic() + WATCH_S
        async with self._changed:
            while time.monotonic() < until and generation == self._state.generation.number:
                if self._state.stop_asked or self._state.should_let_in(time.monotonic()):
                    break
                await self._wait(0.1 if self._state.newcomers else 0.5)
            return self._state.should_let_in(time.monotonic()), self._state.stop_asked

    async def stop(self) -> None:
        """Asks the members to stop at the next step boundary."""
        async with self._changed:
            self._state.stop_asked = True
            self._changed.notify_all()

    async def close(self) -> None:
        """The run is over: whoever waits at the door may go."""
        async with self._changed:
            self._state.closed = True
            self._changed.notify_all()

    async def _wait(self, limit_s: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(self._changed.wait(), limit_s)

    async def _ask_around(self) -> None:
        """While some wait: finds out who of those who train or wait is dead; quickly after an arrival, then less often."""
        pause_s = CHECK_EVERY_S
        while workers := self._state.to_ask:
            answers = await asyncio.gather(*(is_alive(self._handles[worker]) for worker in workers))
            for worker, alive in zip(workers, answers, strict=True):
                if not alive:
                    await self.lose(worker)
            for worker in self._state.overdue(time.monotonic()):
                ray.kill(self._handles[worker])  # the controller finds it dead, and replaces it
                await self.lose(worker)
            pause_s = CHECK_EVERY_S if self._arrived.is_set() else min(2 * pause_s, ASK_AT_LEAST_EVERY_S)
            self._arrived.clear()
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), pause_s)


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
