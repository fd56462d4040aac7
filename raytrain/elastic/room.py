"""How many workers would fit now, and is that worth a change? Of runs that restart at each change.

Room is asked for by placement groups of one worker each, which stay pending until there is some. So nothing here counts
CPUs: it respects how they lie on the nodes and what others use, and what is pending is the demand that the autoscaler
sees. What is placed is held until it is given back. Runs in the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

START_SETTLE_S = 2.0
"""For so long there must be the same room before fewer workers begin than are wanted; Ray places what waits within 1 s."""
GROW_SETTLE_S = 10.0
"""For so long there must be the same room before a restart is worth it."""


def num_to_begin(num_free: int, steady_s: float, workers: tuple[int, int], settled_s: float) -> int:
    """How many workers begin now; 0 to wait.

    Args:
        num_free: workers for which there is room.
        steady_s: seconds for which it has been so many.
        workers: the fewest and the most that are wanted.
        settled_s: seconds for which nothing has been about to be given back.
    """
    low, high = workers
    is_enough = num_free >= high or (num_free >= low and min(steady_s, settled_s) >= START_SETTLE_S)
    return min(num_free, high) if is_enough else 0


def is_worth_a_restart(num_free: int, steady_s: float, has_trained: bool) -> bool:
    """Whether a group should end for a larger one.

    Args:
        num_free: further workers for which there is room.
        steady_s: seconds for which it has been so many.
        has_trained: whether the group has finished a step.
    """
    return num_free > 0 and steady_s >= GROW_SETTLE_S and has_trained


@dataclass
class Steady:
    """A number, and since when it has been the same."""

    value: int = -1
    since: float = 0.0

    def look(self, value: int, now: float) -> float:
        """Seconds for which it has been `value`."""
        if value != self.value:
            self.value, self.since = value, now
        return now - self.since


@dataclass
class Room:
    """Asks for places.

    Args:
        resources: of one worker, {"CPU": 1.0}.
    """

    resources: dict[str, float]
    _asked: list[Any] = field(default_factory=list)
    _steady: Steady = field(default_factory=Steady)

    def ask(self, num: int) -> None:
        """From now on so many places are wanted."""
        while len(self._asked) < num:
            self._asked.append(placement_group([dict(self.resources)]))
        while len(self._asked) > num:
            remove_placement_group(self._asked.pop())

    def look(self, now: float) -> tuple[int, float]:
        """How many of the places are there, and for how many seconds it has been so many; `now` in monotonic seconds."""
        num_free = sum(_is_placed(group) for group in self._asked)
        return num_free, self._steady.look(num_free, now)

    def give_back(self) -> None:
        """What is held is free for others, and for the workers themselves."""
        self.ask(0)
        self._steady = Steady()


def _is_placed(group: Any) -> bool:
    """Asked of the table, since `wait` takes whole seconds, and with 0 of them it often misses what is there."""
    return bool(placement_group_table(group).get("state") == "CREATED")
