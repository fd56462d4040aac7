"""Does the process of a worker live? Asked of Ray, of all workers while somebody waits, and of the process itself.

A worker whose process is gone is known to Ray. One whose heartbeats have stopped may be cut off or stopped; or some call
holds its GIL, and then the TCPStore that it serves, whose thread needs no GIL, still answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable
from typing import Any

from ray.exceptions import GetTimeoutError, RayActorError

from raytrain.rendezvous.health import Address

FIRST_PROBE_S, MAX_PROBE_S = 0.02, 0.5
PROBE_S_PER_WORKER = 0.0005
"""Pause per probed worker: a thousand of them are probed twice a second at most."""
PROBE_TIMEOUT_S = 0.5
WORKER_KEY = "worker"
"""Key of a worker's own store under which it keeps its identity."""
VALIDATE, VALIDATION, GET, PREFIX = 0, 0x3C85F7CE, 3, "/"
"""First bytes of a connection to a TCPStore, its command that reads a key, and what it writes before keys; see
TCPStoreBackend.hpp of PyTorch. Its own client would cost this process the import of torch."""


class LivenessProbe:
    """Finds dead workers by calls to their processes while somebody waits: often after an arrival, then less often.

    Args:
        to_probe: names the workers whose death matters now; none once nobody waits.
        handles: of Ray Train workers, by name; others are not probed.
        report_lost: called with each dead worker.
    """

    def __init__(
        self, to_probe: Callable[[], list[str]], handles: dict[str, Any], report_lost: Callable[[str], None]
    ) -> None:
        self._to_probe, self._handles, self._report_lost = to_probe, handles, report_lost
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """A worker has arrived, perhaps because it has lost a peer: probes soon."""
        self._arrived.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        pause_s = FIRST_PROBE_S
        while workers := self._to_probe():
            known = [worker for worker in workers if worker in self._handles]
            alive = await asyncio.gather(*(is_alive(self._handles[worker]) for worker in known))
            for worker, lives in zip(known, alive, strict=True):
                if not lives:
                    self._report_lost(worker)
            pause_s = FIRST_PROBE_S if self._arrived.is_set() else min(2 * pause_s, MAX_PROBE_S)
            self._arrived.clear()
            min_s = PROBE_S_PER_WORKER * len(known)
            await asyncio.sleep(min_s)
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), max(0.0, pause_s - min_s))


async def is_alive(handle: Any) -> bool:
    """Whether the process of a Ray Train worker lives.

    A worker that Ray calls unavailable (for seconds, after its node died) counts as dead at once: that is safe, since it
    joins again as a newcomer if it comes back.
    """
    try:
        await asyncio.wait_for(handle.execute.remote(int), PROBE_TIMEOUT_S)
    except RayActorError:
        return False
    except (asyncio.TimeoutError, TimeoutError, GetTimeoutError):
        return True  # busy, not dead
    return True


async def store_answers(worker: str, address: Address, timeout_s: float) -> bool:
    """Whether the TCPStore at `address` is the one of `worker`, and answers in time."""
    try:
        return await asyncio.wait_for(_read_key(address, PREFIX + WORKER_KEY), timeout_s) == worker
    except (OSError, EOFError, UnicodeDecodeError, asyncio.TimeoutError, TimeoutError):
        return False


async def _read_key(address: Address, key: str) -> str:
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(struct.pack("=BIBQ", VALIDATE, VALIDATION, GET, len(key)) + key.encode())
        (length,) = struct.unpack("=Q", await reader.readexactly(8))
        return (await reader.readexactly(length)).decode()
    finally:
        writer.close()
