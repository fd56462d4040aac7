"""Runs without Ray whose workers share a few processes, one after the other: ten times as fast as a process each.

A worker that is to die raises `Killed` instead: its process group breaks as after a SIGKILL, and it is not heard of again.
"""

from __future__ import annotations

import queue
import threading
from multiprocessing.connection import Connection
from typing import Any

from tests.support.local import CONTEXT, ChildJob, LocalRun


class Pooled:
    """A process that is one worker after the other."""

    idle: queue.SimpleQueue[Pooled] = queue.SimpleQueue()

    def __init__(self) -> None:
        from tests.support.child import run_children

        self._jobs, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=run_children, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    @classmethod
    def take(cls) -> Pooled:
        try:
            return cls.idle.get_nowait()
        except queue.Empty:
            return cls()

    def run(self, job: ChildJob) -> tuple[Connection, Connection]:
        (calls, their_calls), (events, their_events) = CONTEXT.Pipe(), CONTEXT.Pipe()
        self._jobs.send((job, their_calls, their_events))
        their_calls.close()
        their_events.close()
        return calls, events


class PooledRun(LocalRun):
    """A `LocalRun` in processes of the pool."""

    def _launch(self, job: ChildJob) -> tuple[Any, Connection, Connection]:
        pooled = Pooled.take()
        calls, events = pooled.run(job)
        return _Worker(pooled), calls, events

    def _serve_calls(self, name: str, pipe: Connection) -> None:
        super()._serve_calls(name, pipe)
        self._children[name].process.is_over.set()


class _Worker:
    """The time of a pooled process as one worker; looks like a process to `LocalRun`."""

    def __init__(self, pooled: Pooled) -> None:
        self._pooled, self.is_over = pooled, threading.Event()

    def is_alive(self) -> bool:
        return not self.is_over.is_set() and self._pooled.process.is_alive()

    def kill(self) -> None:
        """Gives the process back; one that does not end its work is killed."""
        if self.is_over.wait(5.0) and self._pooled.process.is_alive():
            Pooled.idle.put(self._pooled)
        else:
            self._pooled.process.kill()

    def join(self) -> None:
        """Nothing to wait for."""
