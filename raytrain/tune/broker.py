"""Who allocates workers to the trials of a sweep? The broker: one Ray actor per sweep.

It polls the cluster several times a second and decides by `allocation`. All that it knows are the demands that trials
repeat, so Ray may restart it at any time. It is detached, since any trial may start first or end last, and exits when no
trial has reported for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util import placement_group_table

from raytrain.elastic.membership import Demand
from raytrain.elastic.placement import EXTRA, extra_prefix
from raytrain.launch.cluster import pinned
from raytrain.tune.allocation import (
    PendingGroups,
    TrialDemand,
    allocate,
    ranks,
    spare_workers,
    workers_that_fit,
    workers_to_release,
)

POLL_S = 0.25
WARMUP_S = 2.0
"""A new broker collects demands for so long before it allocates."""
IDLE_LIMIT_S = 30.0
"""The broker exits when no trial has reported for so long."""
SILENCE_LIMIT_S = 6.0
"""A trial that has not reported for so long has ended."""
RANKS_HOLD_S = 10.0
"""Ranks are kept for so long, since a worker that changes trials has to start."""

PlacementGroups = Mapping[str, Mapping[str, Any]]
"""Ray's `placement_group_table()`: name, state and bundles of each group, by id."""


@dataclass
class SweepAllocation:
    """The demands of a sweep's trials, and the workers that each of them is allocated.

    Args:
        policy: "fair" or "best".
        mode: "min" or "max", of the metric by which trials are ranked.
        max_workers: of all trials together; None for what there is room for.
        demands: the last demand of each trial, and its monotonic time in seconds.
        curves: of each trial, values of the sweep's metric by finished steps.
        workers: of each trial.
    """

    policy: str
    mode: str
    max_workers: int | None = None
    demands: dict[str, tuple[Demand, float]] = field(default_factory=dict)
    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    workers: dict[str, int] = field(default_factory=dict)
    _pending: PendingGroups = field(default_factory=PendingGroups)
    _ranks: dict[str, float] = field(default_factory=dict)
    _ranked_at: float = 0.0

    def update(self, groups: PlacementGroups, available: Mapping[str, float], now: float) -> bool:
        """Allocates again; returns whether that changed anything.

        Args:
            groups: Ray's `placement_group_table()`.
            available: Ray's `available_resources()`.
            now: monotonic time in seconds.
        """
        self.demands = {name: (demand, at) for name, (demand, at) in self.demands.items() if now - at < SILENCE_LIMIT_S}
        before, demands = self.workers, [demand for demand, _ in self.demands.values()]
        if not demands:
            self.workers = {}
            return bool(before)
        if not self._ranks or now - self._ranked_at >= RANKS_HOLD_S:
            self._ranks, self._ranked_at = ranks(self.curves, self.mode), now
        worker = demands[0].resources
        extra, num_free = extra_workers(groups, self.demands), workers_that_fit(available, worker)
        pending = self._pending.update(pending_needs(groups, worker), num_free, now)
        num_spare = spare_workers(num_free, sum(extra.values()), pending)
        if self.max_workers is not None:
            num_spare = min(num_spare, max(0, self.max_workers - sum(demand.min_workers for demand in demands)))
        trials = [self._trial_demand(demand, extra[demand.name]) for demand in demands]
        self.workers = allocate(trials, num_spare, self.policy)
        return self.workers != before

    def _trial_demand(self, demand: Demand, num_extra: int) -> TrialDemand:
        num_workers = self.workers.get(demand.name, demand.min_workers + num_extra)
        return TrialDemand(
            demand.name, demand.min_workers, demand.max_workers, num_workers, self._ranks.get(demand.name, 0.5)
        )


def extra_workers(groups: PlacementGroups, names: Iterable[str]) -> dict[str, int]:
    """For each trial, how many workers it has beyond its smallest group."""
    created = [str(group["name"]) for group in groups.values() if group["state"] == "CREATED"]
    return {name: sum(group.startswith(extra_prefix(name)) for group in created) for name in names}


def pending_needs(groups: PlacementGroups, worker: Mapping[str, float]) -> dict[str, int]:
    """For each pending placement group, how many workers' room it needs; extra workers of trials do not count."""
    return {
        group_id: workers_to_release(group["bundles"].values(), worker)
        for group_id, group in groups.items()
        if group["state"] in ("PENDING", "RESCHEDULING") and not str(group["name"]).startswith(EXTRA)
    }


class Broker:
    """The actor. Trials call `request`, `changed`, `leave` and `report`; the sweep's driver calls `demands`.

    Args:
        policy, mode, max_workers: of `SweepAllocation`.
    """

    def __init__(self, policy: str, mode: str, max_workers: int | None = None) -> None:
        self._state = SweepAllocation(policy, mode, max_workers)
        self._started = self._last_report = time.monotonic()
        self._changed = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Starts to poll the cluster, unless that runs already."""
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())

    async def request(self, demand: Demand) -> None:
        """Takes a trial's demand, which it repeats; a trial that stops repeating it has ended."""
        self._last_report = time.monotonic()
        self._state.demands[demand.name] = demand, self._last_report
        await self.begin()

    async def changed(self, name: str, known: int) -> int:
        """Waits until the allocation of a trial differs from the number `known`, and returns it."""
        while self._state.workers.get(name, known) == known:
            await self._changed.wait()
        return self._state.workers[name]

    async def leave(self, name: str) -> None:
        """Ends the demand of a trial."""
        self._state.demands.pop(name, None)

    async def report(self, name: str, step: int, value: float) -> None:
        """Takes a trial's value of the sweep's metric after `step` finished steps."""
        self._state.curves.setdefault(name, {})[step] = value

    async def demands(self) -> dict[str, Demand]:
        """The last demand of each running trial, by name."""
        return {name: demand for name, (demand, _) in self._state.demands.items()}

    async def _poll(self) -> None:
        while time.monotonic() - self._last_report < IDLE_LIMIT_S:
            self._update(time.monotonic())
            await asyncio.sleep(POLL_S)
        ray.actor.exit_actor()

    def _update(self, now: float) -> None:
        if now - self._started < WARMUP_S:
            return
        if self._state.update(placement_group_table(), ray.available_resources(), now):
            self._changed.set()
            self._changed = asyncio.Event()


def broker_of(sweep: str, policy: str, mode: str, max_workers: int | None) -> Any:
    """Handle of a sweep's broker; whoever calls first starts it, on its own node."""
    options = {"name": f"raytrain-broker/{sweep}", "lifetime": "detached", "get_if_exists": True}
    broker = pinned(Broker, **options, max_restarts=-1, max_concurrency=10_000).remote(policy, mode, max_workers)
    broker.begin.remote()
    return broker
