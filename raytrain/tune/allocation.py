"""How many workers does each trial of a sweep get? The broker's decisions, as pure functions.

Each trial keeps its smallest group. `spare_workers` says how many workers the cluster has beyond these groups, less what
pending placement groups need; `allocate` assigns them to trials. Knows neither Ray nor the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

PENDING_LIMIT_S = 10.0
"""A placement group that stays pending for so long although there is room for it waits for something else."""


@dataclass(frozen=True)
class TrialDemand:
    """What one trial asks for.

    Args:
        name: of the trial.
        min_workers, max_workers: its smallest group, and the most that it can use.
        num_workers: its allocation so far.
        rank: 0.0 for the best trial, up to 1.0.
    """

    name: str
    min_workers: int
    max_workers: int
    num_workers: int
    rank: float = 0.5


def spare_workers(num_free: int, num_extra: int, pending: Iterable[int]) -> int:
    """Workers beyond the smallest groups that all trials together may have.

    Args:
        num_free: workers for which there is room now.
        num_extra: workers that trials have beyond their smallest groups.
        pending: for each pending placement group, how many workers' room it needs; the smallest are served first, and those
            for which there is not enough are ignored.
    """
    spare = max(0, num_free) + num_extra
    for need in sorted(pending):
        if need <= spare:
            spare -= need
    return spare


def allocate(demands: Sequence[TrialDemand], num_spare: int, policy: str) -> dict[str, int]:
    """Workers of each trial, at least its smallest group.

    Args:
        demands: of the trials that run.
        num_spare: of `spare_workers`.
        policy: "fair" gives each spare worker to the trial with the fewest workers, "best" to the one with the best rank
            until that has its maximum. A tie goes to the trial that has had the worker already.
    """
    allocation = {demand.name: demand.min_workers for demand in demands}
    for _ in range(num_spare):
        unmet = [demand for demand in demands if allocation[demand.name] < demand.max_workers]
        if not unmet:
            break
        if policy == "best":
            chosen = min(unmet, key=lambda one: (one.rank, allocation[one.name] >= one.num_workers, one.name))
        else:
            chosen = min(unmet, key=lambda one: (allocation[one.name], -one.num_workers, one.name))
        allocation[chosen.name] += 1
    return allocation


def ranks(curves: Mapping[str, Mapping[int, float]], mode: str) -> dict[str, float]:
    """For each trial, the fraction of trials that were better at its newest step; 0.0 for the best, 1.0 without a value.

    Args:
        curves: for each trial, its values of the sweep's metric by finished steps.
        mode: "min" or "max".
    """
    sign = 1.0 if mode == "min" else -1.0
    found = {}
    for name, curve in curves.items():
        newest = max((step for step, value in curve.items() if math.isfinite(value)), default=None)
        if newest is None:
            found[name] = 1.0
            continue
        others = [other[newest] for other in curves.values() if newest in other]
        found[name] = sum(sign * value < sign * curve[newest] for value in others) / len(others)
    return found


def workers_to_release(bundles: Iterable[Mapping[str, float]], worker: Mapping[str, float]) -> int:
    """How many workers must end to make room for these bundles; 0 where that does not help.

    Args:
        bundles: of a placement group.
        worker: resources of one worker.
    """
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return max((math.ceil(total.get(name, 0.0) / amount - 1e-9) for name, amount in worker.items() if amount), default=0)


def workers_that_fit(available: Mapping[str, float], worker: Mapping[str, float]) -> int:
    """How many workers with the resources `worker` fit into what is available."""
    return min((int(available.get(name, 0.0) / amount + 1e-9) for name, amount in worker.items() if amount), default=0)


@dataclass
class PendingGroups:
    """Tracks pending placement groups, and ignores those that stay pending although there is room."""

    _had_room_since: dict[str, float] = field(default_factory=dict)

    def update(self, needs: Mapping[str, int], num_free: int, now: float) -> list[int]:
        """The needs that count, in workers.

        Args:
            needs: how many workers' room each pending placement group needs, by its id.
            num_free: workers for which there is room now.
            now: monotonic time in seconds.
        """
        since = self._had_room_since
        self._had_room_since = {name: since.get(name, now) for name, need in needs.items() if need <= num_free}
        return [n for name, n in needs.items() if n and now - self._had_room_since.get(name, now) <= PENDING_LIMIT_S]
