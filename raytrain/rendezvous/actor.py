"""The rendezvous as a Ray actor: receives heartbeats, blocks workers until a generation forms, and answers the controller.

One per run, in a process of its own on the driver's node, without CPUs. All decisions are made by `state.Rendezvous` and
`health.HealthMonitor`; this file knows time and whom to call. Ray restarts the actor if it dies: it then learns from the
heartbeats who trains, before it admits anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.train  # the handles of workers need it, and the first one should not wait for it

from raytrain.rendezvous.health import Address, HealthMonitor, HealthTimeouts, Heartbeat, HeartbeatReply
from raytrain.rendezvous.probe import LivenessProbe, store_answers
from raytrain.rendezvous.state import EMPTY_GENERATION, Generation, JoinRequest, Rendezvous, Signals

CHECK_EVERY_S = 0.5
WATCH_S = 10.0
FORM_EVERY_S = 0.02

Reply = tuple[bool, Generation | None]
"""Whether a join request is to be answered now, and with what."""


@dataclass(frozen=True)
class RendezvousStatus:
    """What the controller needs to know.

    Args:
        evicted: workers that were evicted and killed since the rendezvous started, with the reason.
        drained: workers that left as they were asked to.
        members: of the latest generation, in the order of ranks.
        step: the most finished steps that any worker has reported.
        generation: number of the latest generation.
        lost_in: the generations in which members were lost; those of one generation were lost together.
        started_at: Unix time of the start of its process in seconds; a restarted one does not know which workers are gone.
    """

    evicted: dict[str, str]
    drained: frozenset[str]
    members: tuple[str, ...]
    step: int
    generation: int = 0
    lost_in: dict[str, int] = field(default_factory=dict)
    started_at: float = 0.0


class RendezvousActor:
    """Runs as an asyncio actor, so that any number of workers can wait in it.

    Args:
        min_workers: the smallest generation.
        timeouts: after which a silent or stuck worker is evicted.
        is_restarted: whether it replaces one that died; asked of Ray by default.
        max_workers: the largest generation; further workers are spares.
    """

    def __init__(
        self,
        min_workers: int,
        timeouts: HealthTimeouts | None = None,
        is_restarted: bool | None = None,
        max_workers: int = sys.maxsize,
    ) -> None:
        self._state = Rendezvous(min_workers, max_workers=max_workers)
        self._health = HealthMonitor(timeouts or HealthTimeouts(), CHECK_EVERY_S)
        self._handles: dict[str, Any] = {}
        self._evicted: dict[str, str] = {}
        self._drained: set[str] = set()
        self._gone: set[str] = set()
        """Workers that the controller has given up; one that comes back was replaced, and may exit."""
        self._lost_in: dict[str, int] = {}
        self._started_at = time.time()
        self._asked: dict[str, asyncio.Task[None]] = {}
        """Silent workers, and the calls that ask their stores for a sign of life."""
        self._barrier = JoinBarrier(self._form, self._reply)
        self._probe = LivenessProbe(lambda: self._state.to_probe, self._handles, self._report_lost)
        self._health_check: asyncio.Task[None] | None = None
        if is_restarted is None:
            is_restarted = ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed
        self._opens_at = time.monotonic() + self._health.timeouts.heartbeat_s if is_restarted else 0.0
        """By then every living worker has reported its generation; the others are dead by the same timeout."""

    async def expect(self, worker: str) -> None:
        """The process of `worker` runs and will join soon."""
        self._state.expect(worker)
        self._health.expect(worker, time.monotonic(), is_starting=True)

    async def heartbeat(self, heartbeat: Heartbeat, handle: Any = None) -> HeartbeatReply:
        """Takes a heartbeat; its generation may come without members once they are known."""
        if self._health_check is None or self._health_check.done():
            self._health_check = asyncio.create_task(self._check_health())
        self._state.max_step = max(self._state.max_step, heartbeat.step)
        if not self._is_gone(heartbeat.worker) and heartbeat.worker not in self._drained:
            self._health.record(heartbeat, time.monotonic())
        if handle is not None:
            self._handles[heartbeat.worker] = handle
        is_known = heartbeat.worker in self._handles
        if heartbeat.generation is None:
            return HeartbeatReply(False, is_known)
        number = heartbeat.generation.number
        if number > self._state.generation.number and not self._is_open:
            if not heartbeat.generation.members:
                return HeartbeatReply(False, is_known=False)
            self._recover(heartbeat.generation)
        if number == self._state.generation.number:
            is_left_behind = heartbeat.worker in self._state.overdue(time.monotonic(), self._health.timeouts.heartbeat_s)
            return HeartbeatReply(self._state.is_broken or is_left_behind, is_known)
        return HeartbeatReply(self._is_open, is_known)

    async def report_lost(self, worker: str) -> None:
        """The process of `worker` is gone, or has been killed by the controller."""
        self._gone.add(worker)
        self._report_lost(worker)

    async def drain(self, worker: str) -> bool:
        """Asks `worker` to leave after its step; returns whether it takes part in the run, so that it must be waited for."""
        while not self._is_open:
            await self._barrier.changed(CHECK_EVERY_S)
        must_wait = self._state.drain(worker) or worker in self._drained
        self._barrier.notify()
        return must_wait

    async def join(self, request: JoinRequest, handle: Any) -> Generation | None:
        """Blocks until a generation with this worker forms; None when it may exit: the run is over, or goes on without it.

        Returns EMPTY_GENERATION if the worker was declared dead while it waited. Nobody joins again in its name, since the
        call of a worker that is really dead waits here like any other.
        """
        if self._is_gone(request.worker):
            return None  # it was cut off, and comes back although it was killed: it has been replaced
        self._handles[request.worker] = handle
        self._state.join(request, time.monotonic())
        self._probe.start()
        return await self._barrier.wait(request)

    async def watch(self, generation: int) -> Signals:
        """Blocks, for some seconds at most, until members of `generation` should do something after their step."""
        deadline = time.monotonic() + WATCH_S
        while (signals := self._signals(generation)) == Signals() and time.monotonic() < deadline:
            await self._barrier.changed(0.1 if self._state.candidates else 0.5)
        return signals

    async def status(self) -> RendezvousStatus:
        generation = self._state.generation
        return RendezvousStatus(
            evicted=dict(self._evicted),
            drained=frozenset(self._drained),
            members=tuple(member.worker for member in generation.members),
            step=self._state.max_step,
            generation=generation.number,
            lost_in=dict(self._lost_in),
            started_at=self._started_at,
        )

    async def stop(self) -> None:
        """Asks the members to stop at the next step boundary."""
        self._state.stop_requested = True
        self._barrier.notify()

    async def save_and_stop(self) -> None:
        """There were too few workers for too long: those that wait form a generation, to save their state and stop."""
        self._state.min_workers, self._state.stop_requested = 1, True
        self._barrier.notify()

    async def close(self) -> None:
        """The run is over: all workers that wait may exit."""
        self._state.closed = True
        self._barrier.notify()

    def _is_gone(self, worker: str) -> bool:
        return worker in self._evicted or worker in self._gone

    @property
    def _is_open(self) -> bool:
        return time.monotonic() >= self._opens_at

    def _signals(self, generation: int) -> Signals:
        if not self._is_open:
            return Signals(stop=self._state.stop_requested)
        if generation != self._state.generation.number:
            return Signals(regroup=True)  # the others have gone on without it
        return self._state.signals(time.monotonic())

    def _form(self) -> bool:
        """Releases drained workers and forms the next generation if possible; returns whether something has changed."""
        if not self._is_open:
            return False
        released = self._state.release_drained()
        for worker in released:
            self._drained.add(worker)
            self._health.forget(worker)
        return self._state.form(time.monotonic()) is not None or bool(released)

    def _reply(self, request: JoinRequest) -> Reply:
        if self._state.closed or request.worker in self._drained:
            return True, None
        generation = self._state.generation if self._state.has_admitted(request) else EMPTY_GENERATION
        return not self._state.is_waiting(request), generation

    def _recover(self, generation: Generation) -> None:
        self._state.recover(generation)
        for member in generation.members:
            self._health.expect(member.worker, time.monotonic(), is_starting=False, store=member.store)

    def _report_lost(self, worker: str) -> None:
        if worker in self._state.alive:
            self._lost_in[worker] = self._state.generation.number
        self._state.report_lost(worker, time.monotonic())
        self._health.forget(worker)
        self._barrier.notify()

    async def _check_health(self) -> None:
        """Evicts workers that are silent or stuck, and breaks a generation whose members all wait for each other."""
        heartbeat_s = self._health.timeouts.heartbeat_s
        while not self._state.closed:
            await asyncio.sleep(CHECK_EVERY_S)
            now = time.monotonic()
            for worker, store in self._health.silent(now).items():
                if worker not in self._asked:
                    self._asked[worker] = asyncio.create_task(self._ask(worker, store))
            overdue, generation = self._state.overdue(now, 2 * heartbeat_s), self._state.generation
            for worker, reason in self._health.unhealthy(now, overdue, generation).items():
                self._evict(worker, reason)
            if self._health.is_stalled(generation, now):
                self._state.stall(now)

    async def _ask(self, worker: str, store: Address) -> None:
        if await store_answers(worker, store, self._health.timeouts.heartbeat_s / 2):
            self._health.record_answer(worker, time.monotonic())
        del self._asked[worker]

    def _evict(self, worker: str, reason: str) -> None:
        self._evicted[worker] = reason
        if worker in self._handles:
            ray.kill(self._handles[worker])  # the controller reads it in the status and replaces the worker
        self._report_lost(worker)


class JoinBarrier:
    """Holds the calls of workers that wait for a generation, and answers each once.

    One task checks whether a generation can form, so that a thousand waiting workers cost no more than one check at a time.

    Args:
        form: forms what can be formed now; returns whether a waiting call has to be answered.
        reply: what to answer to a request.
    """

    def __init__(self, form: Callable[[], bool], reply: Callable[[JoinRequest], Reply]) -> None:
        self._form, self._reply = form, reply
        self._calls: dict[str, tuple[JoinRequest, asyncio.Future[Generation | None]]] = {}
        self._change = asyncio.Event()
        self._has_replies = False
        self._task: asyncio.Task[None] | None = None

    async def wait(self, request: JoinRequest) -> Generation | None:
        """Blocks until there is a reply to this very request."""
        previous = self._calls.pop(request.worker, None)
        if previous is not None:  # that call was lost on the way, and the worker has called again
            _answer(previous[1], self._reply(previous[0])[1])
        call: asyncio.Future[Generation | None] = asyncio.get_running_loop().create_future()
        self._calls[request.worker] = request, call
        self._has_replies |= self._reply(request)[0]
        self._wake()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._fail_calls)
        return await call

    def notify(self) -> None:
        """The state has changed: some calls may have a reply now, or a generation may form."""
        self._has_replies = True
        self._wake()

    async def changed(self, timeout_s: float) -> None:
        """Returns when the state has changed, or after the timeout."""
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(self._change.wait(), timeout_s)

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _run(self) -> None:
        while self._calls:
            if self._form():
                self.notify()
            if self._has_replies:
                self._has_replies = False
                self._answer_all()
            if self._calls:
                await self.changed(FORM_EVERY_S)

    def _answer_all(self) -> None:
        for worker, (request, call) in list(self._calls.items()):
            is_due, generation = self._reply(request)
            if is_due:
                del self._calls[worker]
                _answer(call, generation)

    def _fail_calls(self, task: asyncio.Task[None]) -> None:
        """Fails all calls if the task failed, so that nobody waits for ever."""
        failure = None if task.cancelled() else task.exception()
        if failure is None:
            return
        for _, call in self._calls.values():
            if not call.done():
                call.set_exception(failure)
        self._calls.clear()


def _answer(call: asyncio.Future[Generation | None], generation: Generation | None) -> None:
    if not call.done():
        call.set_result(generation)
