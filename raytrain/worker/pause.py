"""How long did training stand still between two generations, and with what? Measured by each worker, told by the leader."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pause:
    """Times of one worker's steps and of the latest break.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._committed = clock()
        self._step_s = 0.0
        self._broke: float | None = None

    def commit(self) -> None:
        """A step is finished."""
        now = self._clock()
        self._step_s, self._committed, self._broke = now - self._committed, now, None

    def break_off(self) -> None:
        """The step in flight is lost."""
        self._broke = self._broke or self._clock()

    def parts(self, waited_s: float) -> dict[str, float]:
        """The pause that ends now, as fields of `GenerationFormed`, in seconds.

        Args:
            waited_s: spent at the door with too few workers.
        """
        pause_s = self._clock() - self._committed
        in_flight_s = (self._broke or self._committed) - self._committed
        redone_s = min(in_flight_s, self._step_s)
        return {
            "pause_s": pause_s,
            "redone_s": redone_s,
            "detecting_s": in_flight_s - redone_s,
            "waiting_s": min(waited_s, pause_s - in_flight_s),
        }
