"""What does the training thread do, and since when? Told to the rendezvous in heartbeats, from a thread of its own.

The training thread only writes down where it is. Where the answer to a heartbeat says that a peer is gone, the thread
breaks the collective in which the training thread may be stuck, as far as the process group can be broken from outside.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ray.exceptions import RayError

from raytrain.rendezvous.client import RendezvousClient
from raytrain.rendezvous.state import NO_STATE, Generation
from raytrain.rendezvous.vitals import AT_DOOR, STARTING, Beat

CAREFUL_STEPS = 1000
"""Heartbeats are seconds apart, so processes may have died so many steps further than anybody knows."""

log = logging.getLogger(__name__)


class Pulse:
    """The heartbeats of one worker.

    Args:
        rendezvous: is told.
        worker: whose heartbeats they are.
        every_s: seconds between two.
        clock: monotonic time in seconds.
    """

    def __init__(
        self, rendezvous: RendezvousClient, worker: str, every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rendezvous, self._worker, self._every_s, self._clock = rendezvous, worker, every_s, clock
        self._where = (STARTING, clock())
        self._places: set[str] = set()
        self._known_places: frozenset[str] = frozenset()
        self._step = NO_STATE
        self._generation: Generation | None = None
        self._abort: Callable[[], None] | None = None
        self._careful_below = 0
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def mark(self, place: str) -> None:
        """The training thread begins with something."""
        self._places.add(place)
        self._where = (place, self._clock())

    def begin_step(self, step: int) -> None:
        """The training thread begins with a step, and has as many finished ones in its memory.

        Where all who were further have died, that is told at once: if this process dies too, it is known in which step.
        """
        self._step = step
        if step < self._careful_below:
            self._tell()

    def finish_step(self, step: int) -> None:
        """The training thread has finished a step."""
        self._step = step
        if len(self._known_places) < len(self._places):
            self._known_places = frozenset(self._places)

    def join(self, generation: Generation, abort: Callable[[], None]) -> None:
        """From now on the worker trains in `generation`; `abort` breaks the collective that waits for a lost peer."""
        self._generation, self._abort = generation, abort
        is_behind = generation.reached > max(member.step for member in generation.members)
        self._careful_below = generation.reached + CAREFUL_STEPS if is_behind else 0

    def part(self) -> None:
        """The worker's generation is over."""
        self._abort = None
        self.mark(AT_DOOR)

    def close(self) -> None:
        self._closed.set()

    def beat(self) -> None:
        """Sends one heartbeat and acts on the answer."""
        abort = self._abort  # that of the generation which the answer is about
        place, since = self._where
        is_first = place not in self._known_places
        beat = Beat(self._worker, self._step, place, self._clock() - since, is_first, self._generation)
        is_broken = self._rendezvous.beat(beat)
        if is_broken and abort is not None and abort is self._abort:
            self._abort = None
            abort()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._tell()
            self._closed.wait(self._every_s)

    def _tell(self) -> None:
        try:
            self.beat()
        except (RayError, OSError) as error:
            log.debug("a heartbeat was not delivered: %s", error)
