"""One group of workers that is started once by plain Ray Train, and never mended. The driver's view of it.

Ray Train's `fit` runs in a thread of its own, since it blocks for as long as the group lives. Nothing is decided here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
import ray.train
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from raytrain.elastic.attempt_rendezvous import Report
from raytrain.elastic.wiring import worker_name
from raytrain.events.kinds import WorkerStarting

FRESH_LIMIT_S = 2.0
TOLD_WITHIN_S = 10.0

Work = Callable[[Mapping[str, Any]], None]


class Attempt:
    """Begins at once.

    Args:
        fit: runs the group to its end.
        rendezvous: handle of its `AttemptRendezvous`.
        names: of its workers, by rank.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        fit: Callable[[], object],
        rendezvous: Any,
        names: tuple[str, ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rendezvous, self.names, self._clock = rendezvous, names, clock
        self.report = Report()
        """What was last heard of it."""
        self.known: dict[str, tuple[str, int]] = {}
        """Address of the node and process of each worker that has begun; a rendezvous that was started anew forgets."""
        self.ended: dict[str, bool] = {}
        """Workers whose functions have ended; the value says whether by an error."""
        self.is_to_stop = False
        """Whether it was asked to stop, so that a larger one can follow."""
        self._asked: Any = None
        self._began = clock()
        self._broken_since: float | None = None
        self._running = in_background(fit)

    @property
    def has_ended(self) -> bool:
        """Whether Ray Train has given back all that the group had."""
        return self._running.done()

    @property
    def is_over(self) -> bool:
        """Whether nobody trains any more; Ray Train may take its time after that."""
        return self.has_ended or (len(self.ended) == len(self.names) and not any(self.ended.values()))

    @property
    def error(self) -> BaseException | None:
        """Why Ray Train ended the group, once it has done so; None if the group finished."""
        return self._running.exception() if self.has_ended else None

    def look(self) -> None:
        """Takes the report that was asked for last time, if it is there, and asks for the next one."""
        if self._asked is None or ray.wait([self._asked], timeout=0)[0]:
            self._take(0.0)
            self._asked = self.rendezvous.report.remote()

    def look_closely(self) -> None:
        """Waits for a report of this moment, for a short while."""
        self._asked = self.rendezvous.report.remote()
        self._take(FRESH_LIMIT_S)

    def stop(self) -> None:
        """Asks the workers to save their state and to end; again at each call, since the rendezvous may have been away."""
        self.is_to_stop = True
        self.rendezvous.stop.remote()

    def broken_for_s(self, start_limit_s: float) -> float:
        """Seconds for which it has been known that the group cannot go on; 0 if it can.

        Args:
            start_limit_s: what the start of all workers may take.
        """
        now = self._clock()
        is_late = len(self.known) < len(self.names) and now - self._began > start_limit_s
        if not (is_late or self.report.survey.given_up or any(self.ended.values())):
            self._broken_since = None
            return 0.0
        self._broken_since = now if self._broken_since is None else self._broken_since
        return now - self._broken_since

    def kill(self) -> Any:
        """Ends the workers' processes, which makes Ray Train end the group; returns a reference that is there then."""
        return self.rendezvous.kill_all.remote()

    def close(self, limit_s: float) -> None:
        """Ends what is left, which may take so long; those that begin later find no rendezvous, and end by themselves."""
        if not self.is_over:
            ray.wait([self.kill()], timeout=limit_s)
        ray.kill(self.rendezvous)

    def wait(self, limit_s: float) -> None:
        """Waits until Ray Train has ended it, up to a limit."""
        concurrent.futures.wait([self._running], limit_s)

    def _take(self, limit_s: float) -> None:
        if self._asked is None:
            return
        try:
            self.report = ray.get(self._asked, timeout=limit_s)
        except (RayActorError, GetTimeoutError):
            return
        finally:
            self._asked = None
        self.known |= self.report.known
        self.ended |= self.report.ended


def in_background(work: Callable[[], object]) -> concurrent.futures.Future[object]:
    """Does the work in a thread that nobody has to wait for, also not at the end of the process."""

    async def carry() -> object:
        try:
            return work()
        except SystemExit:  # by which Ray ends whoever still waits for something when it is shut down
            return None

    def turn() -> None:
        loop.run_forever()
        loop.close()

    loop = asyncio.new_event_loop()
    threading.Thread(target=turn, name="attempt", daemon=True).start()
    running = asyncio.run_coroutine_threadsafe(carry(), loop)
    running.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    return running


def told(work: Work, rendezvous: Any, sink: Any, first_worker: int) -> Work:
    """The function that runs in each worker: `work`, with its beginning and its end told.

    Args:
        work: what is done.
        rendezvous: handle of the `AttemptRendezvous`.
        sink: handle of the event sink.
        first_worker: number of the worker with rank 0; they are counted over all attempts.
    """

    def run(config: Mapping[str, Any]) -> None:
        worker = worker_name(first_worker + ray.train.get_context().get_world_rank())
        node, pid, handle = ray.util.get_node_ip_address(), os.getpid(), ray.get_runtime_context().current_actor
        sink.append.remote([WorkerStarting(worker=worker, node=node, pid=pid)])
        with contextlib.suppress(ActorUnavailableError):  # it is being started anew, and learns of us by our heartbeats
            ray.get(rendezvous.begin.remote(worker, node, pid, handle))
        has_raised = True
        try:
            work(config)
            has_raised = False
        finally:
            _tell_end(rendezvous, worker, has_raised)

    return run


def _tell_end(rendezvous: Any, worker: str, has_raised: bool) -> None:
    """A rendezvous that is away never learns it; the driver learns it from Ray Train then."""
    with contextlib.suppress(RayError):
        ray.get(rendezvous.end.remote(worker, has_raised), timeout=TOLD_WITHIN_S)
