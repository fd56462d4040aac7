"""What the broker knows and decides, without Ray and without time: who claims workers, what waits, who gets how many.

Nothing is kept that the trials do not tell again, so that a broker can be started anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raytrain.elastic.places import EXTRA, extra_prefix
from raytrain.elastic.quota import Claim
from raytrain.tune.deal import Player, Waiting, deal, ranks, room_for, spare, workers_worth

SILENT_S = 6.0
"""A trial that has not told anything for so long is over."""
RANKS_HOLD_S = 10.0
"""Ranks are looked at this often, since a worker that changes hands has to start."""

PlacementGroups = Mapping[str, Mapping[str, Any]]
"""Of Ray's `placement_group_table()`: name, state and bundles of each, by id."""


def extra_workers(groups: PlacementGroups, names: Iterable[str]) -> dict[str, int]:
    """Of each trial, the places that it has beyond its smallest group."""
    placed = [str(group["name"]) for group in groups.values() if group["state"] == "CREATED"]
    return {name: sum(group.startswith(extra_prefix(name)) for group in placed) for name in names}


def needs(groups: PlacementGroups, resources: Mapping[str, float]) -> dict[str, int]:
    """Workers' worth of room that each of those who wait needs; extra workers of trials do not count as waiting."""
    return {
        identity: workers_worth(group["bundles"].values(), resources)
        for identity, group in groups.items()
        if group["state"] in ("PENDING", "RESCHEDULING") and not str(group["name"]).startswith(EXTRA)
    }


@dataclass
class Table:
    """The trials of a sweep, and their workers.

    Args:
        policy: "fair" or "best".
        mode: "min" or "max", of the metric by which trials are ranked.
        max_workers: of all trials together; None for what there is room for.
    """

    policy: str
    mode: str
    max_workers: int | None = None
    claims: dict[str, tuple[Claim, float]] = field(default_factory=dict)
    """What each trial told last, and when, in monotonic seconds."""
    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    quotas: dict[str, int] = field(default_factory=dict)
    """Workers of each trial, as they were dealt last."""
    _waiting: Waiting = field(default_factory=Waiting)
    _ranks: dict[str, float] = field(default_factory=dict)
    _ranked_at: float = 0.0

    def look(self, groups: PlacementGroups, available: Mapping[str, float], now: float) -> bool:
        """Deals anew; returns whether that changed anything.

        Args:
            groups: Ray's `placement_group_table()`.
            available: Ray's `available_resources()`.
            now: monotonic time in seconds.
        """
        self.claims = {name: (claim, told) for name, (claim, told) in self.claims.items() if now - told < SILENT_S}
        before, claims = self.quotas, [claim for claim, _ in self.claims.values()]
        if not claims:
            self.quotas = {}
            return bool(before)
        self._rank(now)
        resources = claims[0].resources
        extra, num_free = extra_workers(groups, self.claims), room_for(available, resources)
        num_spare = spare(num_free, sum(extra.values()), self._waiting.look(needs(groups, resources), num_free, now))
        if self.max_workers is not None:
            num_spare = min(num_spare, max(0, self.max_workers - sum(claim.low for claim in claims)))
        self.quotas = deal([self._player(claim, extra[claim.name]) for claim in claims], num_spare, self.policy)
        return self.quotas != before

    def _rank(self, now: float) -> None:
        if not self._ranks or now - self._ranked_at >= RANKS_HOLD_S:
            self._ranks, self._ranked_at = ranks(self.curves, self.mode), now

    def _player(self, claim: Claim, num_extra: int) -> Player:
        has = self.quotas.get(claim.name, claim.low + num_extra)
        return Player(claim.name, claim.low, claim.high, has, self._ranks.get(claim.name, 0.5))
