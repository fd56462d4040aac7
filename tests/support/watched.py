"""A run without Ray whose rendezvous is the product's actor, as a plain asyncio object in a thread of the test.

Heartbeats count, and an eviction kills the worker's process, unless it is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayActorError

from raytrain.rendezvous import actor
from raytrain.rendezvous.actor import RendezvousActor
from raytrain.rendezvous.health import HealthTimeouts, Heartbeat
from raytrain.rendezvous.state import Generation, JoinRequest, Rendezvous, Signals
from tests.support.child import run_child
from tests.support.local import CONTEXT, Child, ChildJob, LocalRun

CALL_LIMIT_S = 120.0


class Handle:
    """What the rendezvous knows of a worker: `execute.remote(int)`, which fails if its process is gone."""

    def __init__(self, child: Child) -> None:
        self.child, self.execute = child, SimpleNamespace(remote=self._execute)

    async def _execute(self, function: Any) -> Any:
        if not self.child.process.is_alive():
            raise RayActorError
        return function()


@dataclass
class WatchedRun(LocalRun):
    """See the module.

    Args:
        is_cut_off: a worker that is evicted is not reached: its process, and its connections, stay.
    """

    is_cut_off: bool = False

    @property
    def evicted(self) -> dict[str, str]:
        return self._actor._evicted

    def _build_state(self) -> Rendezvous:
        config, self._loop = self.config, asyncio.new_event_loop()
        timeouts = (config.heartbeat_timeout_s, config.hang_timeout_s, config.slow_timeout_s, config.collective_timeout_s)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._kill, actor.ray.kill = actor.ray.kill, self._on_kill
        self._actor = RendezvousActor(self.plot.workers, HealthTimeouts(*timeouts))
        return self._actor._state

    def _close(self) -> None:
        actor.ray.kill = self._kill
        self._wait_for(self._actor.close())

    def _wait_for(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(CALL_LIMIT_S)

    def _on_kill(self, handle: Handle) -> None:
        handle.child.done, self._state.min_workers = True, 1
        if not self.is_cut_off:
            handle.child.process.kill()

    def _expect(self, name: str) -> None:
        self._wait_for(self._actor.expect(name))

    def _report_lost(self, name: str) -> None:
        self._wait_for(self._actor.report_lost(name))

    def _launch(self, job: ChildJob) -> tuple[Any, Connection, Connection]:
        """A process as of any run, with a pipe for heartbeats besides."""
        pairs = [CONTEXT.Pipe() for _ in range(3)]
        process = CONTEXT.Process(target=run_child, args=(job, *(theirs for _, theirs in pairs)), daemon=True)
        process.start()
        for _, theirs in pairs:
            theirs.close()
        calls, events, beats = (mine for mine, _ in pairs)
        threading.Thread(target=self._serve_heartbeats, args=(job.worker, beats), daemon=True).start()
        return process, calls, events

    def _serve_heartbeats(self, name: str, pipe: Connection) -> None:
        """Answers the heartbeats of one child until it goes."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                heartbeat: Heartbeat = pipe.recv()
                with self._lock:
                    handle = Handle(self._children[name])
                pipe.send(self._wait_for(self._actor.heartbeat(heartbeat, handle)).is_broken)

    def _on_join(self, child: Child, request: JoinRequest) -> Generation | None:
        generation: Generation | None = self._wait_for(self._actor.join(request, Handle(child)))
        if generation is not None and generation.members and generation not in self.generations:
            self.generations.append(generation)
        return generation

    def _on_watch(self, child: Child, generation: int) -> Signals:
        """For a moment only, since the child's calls use one pipe."""
        signals: Signals = self._wait_for(self._signals(generation))
        return signals

    async def _signals(self, generation: int) -> Signals:
        await asyncio.sleep(0.05)
        return self._actor._signals(generation)

    def _on_close(self, child: Child, _: None) -> None:
        self._wait_for(self._actor.close())
