"""How many workers may a run have now, where several share a cluster? The controller's line to the broker.

Nothing here waits: what the broker said last holds until it says something else, also while it is away. Who gets how many
is decided by the broker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain.elastic.places import Share


@dataclass(frozen=True)
class Claim:
    """What a run tells the broker of itself at each look.

    Args:
        name: of the run, among all that share.
        low, high: the workers that it needs, and the most that it can use.
        resources: of one worker.
        num_workers: that train now.
        step: finished steps.
    """

    name: str
    low: int
    high: int
    resources: dict[str, float]
    num_workers: int = 0
    step: int = 0


class Quota:
    """The number of workers that a run may have.

    Args:
        share: None for a run on its own, which may have as many as it can use.
        low, high: the workers that it needs, and the most that it can use.
        resources: of one worker.
    """

    def __init__(self, share: Share | None, low: int, high: int, resources: dict[str, float]) -> None:
        self._share, self.low, self._high, self._resources = share, low, high, resources
        self.num = low if share else high
        """The most workers now."""
        self._asked: Any = None

    def look(self, num_workers: int, step: int) -> None:
        """Says how the run is, and takes an answer of the broker if there is one."""
        if self._share is None:
            return
        broker, name = self._share.broker, self._share.name
        broker.hold.remote(Claim(name, self.low, self._high, self._resources, num_workers, step))
        if self._asked is None or ray.wait([self._asked], timeout=0)[0]:
            self._take()
            self._asked = broker.changed.remote(name, self.num)

    def leave(self) -> None:
        """The run needs no workers any more."""
        if self._share is not None:
            self._share.broker.leave.remote(self._share.name)

    def _take(self) -> None:
        if self._asked is None:
            return
        try:
            self.num = max(self.low, min(self._high, ray.get(self._asked)))
        except RayError:
            return  # it is started anew, and learns from what the runs tell
