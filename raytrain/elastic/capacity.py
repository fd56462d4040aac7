"""How many workers should be asked for, and are there enough? Pure decisions of the controller.

A missing worker is asked for by a placement group of its own, which stays pending until there is room: that is also the
demand that the autoscaler sees, and it respects what others use. So nothing here counts nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

TELL_AFTER_S = 5.0


def num_to_ask_for(num_staying: int, num_asked: int, num_finished: int, max_workers: int) -> int:
    """Workers to ask for now; none once one of them has finished the run.

    Args:
        num_staying: workers that run, without those that are about to leave.
        num_asked: workers that were asked for and do not run yet.
        num_finished: workers that have finished the run.
        max_workers: the most that are wanted.
    """
    return 0 if num_finished else max(0, max_workers - num_staying - num_asked)


class Placed(Protocol):
    """Somebody who has a place."""

    @property
    def is_extra(self) -> bool:
        """Whether others can use the place once it is given back."""


P = TypeVar("P", bound=Placed)


def surplus(staying: Sequence[P], coming: Sequence[P], num_finished: int, min_workers: int, max_workers: int) -> list[P]:
    """Who is to give its place back, since there are more than the run may have: first those that come, the newest first.

    Those that train are sent away only as long as `min_workers` of them stay: a reserved place that was lost with its node
    is asked for again, and may take long to come.

    Args:
        staying: workers that run and are not about to leave, oldest first.
        coming: workers that were asked for and do not run yet, oldest first.
        num_finished: workers that have finished the run; once there are some, nobody is sent away.
        min_workers, max_workers: the fewest with which the run trains, and the most that it may have.
    """
    num_over = 0 if num_finished else max(0, len(staying) + len(coming) - max_workers)
    newcomers = [one for one in reversed(coming) if one.is_extra]
    trainees = [one for one in reversed(staying) if one.is_extra][: max(0, len(staying) - min_workers)]
    return [*newcomers, *trainees][:num_over]


@dataclass
class Patience:
    """Waits while there are too few workers.

    Args:
        min_workers: what is enough.
        start_s: how long to wait before there ever were enough.
        wait_s: how long to wait afterwards.
    """

    min_workers: int
    start_s: float
    wait_s: float
    since: float | None = None
    """Since when there are too few; None while there are enough."""
    had_enough: bool = False
    told: bool = False

    def look(self, num_running: int, num_placed: int, now: float) -> str:
        """What to do: "" for nothing, "tell" that the run waits, or "end" it.

        Args:
            num_running: workers that run.
            num_placed: these, and those that have their place and are starting.
            now: monotonic time in seconds.
        """
        self.had_enough |= num_running >= self.min_workers
        if num_placed >= self.min_workers:
            self.since, self.told = None, False
            return ""
        self.since = now if self.since is None else self.since
        waited_s = now - self.since
        if waited_s > (self.wait_s if self.had_enough else self.start_s):
            return "end"
        if waited_s > TELL_AFTER_S and not self.told:
            self.told = True
            return "tell"
        return ""


def shortage(asked: dict[str, float], num_workers: int, total: dict[str, float]) -> str:
    """What a cluster lacks for `num_workers` workers, in words, for example "asked for 4 CPU, the cluster has 2"."""
    parts = []
    for name, amount in asked.items():
        if amount:
            parts.append(f"asked for {amount * num_workers:g} {name}, the cluster has {total.get(name, 0.0):g}")
    return "; ".join(parts)
