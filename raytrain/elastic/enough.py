"""Are there enough workers to go on? Says so after a while if not, and ends the run after a longer one.

Those that are left are asked to save their state before the run ends. Runs in the controller's thread.
"""

from __future__ import annotations

from collections.abc import Callable

import ray

from raytrain.elastic.capacity import Patience, shortage
from raytrain.elastic.liaison import Liaison
from raytrain.elastic.wiring import Wiring
from raytrain.errors import ResourceError
from raytrain.events.kinds import Event, WaitingForWorkers


class Enough:
    """Looks at the numbers once per poll.

    Args:
        wiring: of the run.
        resources: of one worker.
        liaison: passes the end of patience on.
        tell: takes an event.
    """

    def __init__(self, wiring: Wiring, resources: dict[str, float], liaison: Liaison, tell: Callable[[Event], None]) -> None:
        self._need, self._resources, self._liaison, self._tell = wiring.min_workers, resources, liaison, tell
        self._patience = Patience(wiring.min_workers, wiring.start_timeout_s, wiring.wait_timeout_s)
        self._gave_up: ResourceError | None = None

    def look(self, num_running: int, num_placed: int, is_over: bool, now: float) -> None:
        """Too few workers: says so after a while, and gives up after a longer one.

        Args:
            num_running: workers that run.
            num_placed: these, and those that have their place and are starting.
            is_over: whether none of them has anything left to do.
            now: monotonic time in seconds.

        Raises:
            ResourceError: there were too few for too long.
        """
        if self._gave_up is not None:
            if is_over:
                raise self._gave_up
            self._liaison.tell_end_of_patience()  # again: a rendezvous that was started anew does not know
            return
        to_do = self._patience.look(num_running, num_placed, now)
        if not to_do:
            return
        reason = shortage(self._resources, self._need, ray.cluster_resources())
        if to_do == "tell":
            self._tell(WaitingForWorkers(have=num_placed, need=self._need, reason=reason))
            return
        self._gave_up = ResourceError(
            "run.workers",
            f"at least {self._need} workers; there were {num_placed} for {now - (self._patience.since or now):.0f} s",
            reason,
            "lower run.workers or run.cpus_per_worker, add nodes, or raise run.start_timeout_s or run.wait_timeout_s",
        )
        if is_over or not self._patience.had_enough:
            raise self._gave_up
        self._liaison.tell_end_of_patience()  # those that are left save their state; then the run ends
