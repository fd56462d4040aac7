"""A worker's two lines to the rendezvous: heartbeats that it sends, and signals that it receives. Each has a thread.

The training thread only notes what it is doing, and reads a value. If the reply to a heartbeat says that a peer is gone,
the heartbeat thread aborts the collective in which the training thread may be stuck, where the backend allows that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray.exceptions import RayError

from raytrain.rendezvous.client import RendezvousClient
from raytrain.rendezvous.health import AT_RENDEZVOUS, STARTING, WAITING, Address, Heartbeat
from raytrain.rendezvous.state import NO_STATE, Generation, Signals
from raytrain.worker.group import Group

REPORT_EACH_STEPS = 1000
"""Heartbeats are seconds apart, so lost workers may have been this many steps ahead of what anybody knows."""
MAX_PLACES = 10_000
"""Activities, each with the shapes of its tensors, whose usual times are kept."""
WATCH_PAUSE_S, WATCH_PAUSE_AFTER_SIGNAL_S = 0.05, 0.25
"""Between two calls: the rendezvous replies at once if there is a signal, or if the generation is over."""

log = logging.getLogger(__name__)


class HeartbeatSender:
    """Sends the heartbeats of one worker.

    Args:
        rendezvous: receives them.
        worker: the worker's identity.
        every_s: seconds between two.
        clock: monotonic time in seconds.
    """

    def __init__(
        self, rendezvous: RendezvousClient, worker: str, every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rendezvous, self._worker, self._every_s, self._clock = rendezvous, worker, every_s, clock
        self._activity = (STARTING, 0, clock())
        """What the training thread does, the variant of it, and since when."""
        self._times: dict[tuple[str, int], float] = {}
        """The most seconds that each activity has taken since the last finished step, by activity and variant."""
        self._usual: dict[tuple[str, int], float] = {}
        """The same in the latest finished step that had it; an activity that is not in it may have to compile."""
        self._store: Address | None = None
        self._step = NO_STATE
        self._generation: Generation | None = None
        self._abort: Callable[[], None] | None = None
        self._report_below = 0
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def serve(self, store: Address) -> None:
        """This process serves a store, which answers for it while the GIL is held."""
        self._store = store

    def set_activity(self, activity: str, variant: int = 0) -> None:
        """The training thread begins with something.

        Args:
            activity: see `rendezvous.health`.
            variant: of calls of the task's code, the shapes of their tensors: new ones may be compiled for.
        """
        self._keep_time()
        self._activity = (activity, variant, self._clock())

    def note_progress(self) -> None:
        """A part of what the training thread is doing is done, such as a block of a checkpoint."""
        activity, variant, _ = self._activity
        self._activity = (activity, variant, self._clock())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The training thread waits for its peers in the midst of something else."""
        activity, variant, _ = self._activity
        self.set_activity(WAITING)
        yield
        self.set_activity(activity, variant)

    def begin_step(self, step: int) -> None:
        """The training thread begins step `step`.

        If all workers that were further are lost, this is reported at once: if this process dies too, its step is known.
        """
        self._step = step
        if step < self._report_below:
            self._try_send()

    def finish_step(self, step: int) -> None:
        """The training thread has `step` finished steps."""
        self._step = step
        self._keep_time()
        for place, seconds in self._times.items():
            if place in self._usual or len(self._usual) < MAX_PLACES:
                self._usual[place] = seconds
        self._times.clear()

    def enter_generation(self, generation: Generation, abort: Callable[[], None]) -> None:
        """The worker trains in `generation` now; `abort` breaks a collective that waits for a lost peer."""
        self._generation, self._abort = generation, abort
        is_behind = generation.max_step > max(member.step for member in generation.members)
        self._report_below = generation.max_step + REPORT_EACH_STEPS if is_behind else 0

    def leave_generation(self) -> None:
        self._abort = None
        self.set_activity(AT_RENDEZVOUS)
        self._times.clear()  # of a step that was not finished: waiting for a lost peer is not usual

    def close(self) -> None:
        self._closed.set()

    def send(self) -> None:
        """Sends one heartbeat and acts on the reply."""
        abort = self._abort  # that of the generation which the reply is about
        activity, variant, since = self._activity
        usual_s, since_s = self._usual.get((activity, variant)), self._clock() - since
        heartbeat = Heartbeat(
            self._worker, self._step, activity, since_s, usual_s is None, self._generation, usual_s or 0.0, self._store
        )
        is_broken = self._rendezvous.heartbeat(heartbeat)
        if is_broken and abort is not None and abort is self._abort:
            self._abort = None
            abort()

    def _keep_time(self) -> None:
        activity, variant, since = self._activity
        self._times[activity, variant] = max(self._times.get((activity, variant), 0.0), self._clock() - since)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._try_send()
            self._closed.wait(self._every_s)

    def _try_send(self) -> None:
        try:
            self.send()
        except (RayError, OSError) as error:
            log.debug("a heartbeat was not delivered: %s", error)


class SignalWatcher:
    """Watches the rendezvous for one generation, on the leader; other ranks learn the signals with each step."""

    def __init__(self, rendezvous: RendezvousClient, group: Group) -> None:
        self.signals = Signals()
        """What this rank wants all ranks to act on."""
        self._rendezvous, self._generation = rendezvous, group.generation.number
        self._closed = threading.Event()
        if group.is_leader:
            threading.Thread(target=self._run, name="signals", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        """Goes on after the first signal, since more may follow: a drain, or a stop."""
        while not self._closed.is_set():
            try:
                self.signals = self._rendezvous.watch(self._generation)
            except RayError:  # it has been down for long; it repeats its signals when it is back
                self._closed.wait(WATCH_PAUSE_AFTER_SIGNAL_S)
                continue
            self._closed.wait(WATCH_PAUSE_S if self.signals == Signals() else WATCH_PAUSE_AFTER_SIGNAL_S)
