"""How many workers does each trial of a sweep get? Pure decisions of the broker.

Every trial has its smallest group for itself. What is dealt here is what the cluster has beyond these: `spare` says how
much that is, and keeps back what others wait for; `deal` says who gets it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

NO_HELP_S = 10.0
"""After so long, with room enough, what waits is taken to wait for something else."""


@dataclass(frozen=True)
class Player:
    """A trial at the table.

    Args:
        name: of the trial.
        low, high: the workers that it has for itself, and the most that it can use.
        has: workers that it was given last.
        rank: 0.0 for the best trial, up to 1.0.
    """

    name: str
    low: int
    high: int
    has: int
    rank: float = 0.5


def spare(num_free: int, num_extra: int, waiting: Iterable[int]) -> int:
    """Workers beyond the smallest groups that all trials together may have.

    Args:
        num_free: workers for which there is room now.
        num_extra: workers that trials have beyond their smallest groups.
        waiting: workers' worth of room that each of those who wait needs; served from the smallest on, if that helps.
    """
    left = max(0, num_free) + num_extra
    for need in sorted(waiting):
        if need <= left:
            left -= need
    return left


def deal(players: Sequence[Player], num_spare: int, policy: str) -> dict[str, int]:
    """Workers of each trial, at least its smallest group.

    Args:
        players: the trials that run.
        num_spare: of `spare`.
        policy: "fair": who has the fewest gets the next one; "best": who is ranked highest gets all it can use. Of equals,
            who has had it keeps it.
    """
    given = {player.name: player.low for player in players}
    for _ in range(num_spare):
        open_to_more = [player for player in players if given[player.name] < player.high]
        if not open_to_more:
            break
        if policy == "best":
            chosen = min(open_to_more, key=lambda player: (player.rank, given[player.name] >= player.has, player.name))
        else:
            chosen = min(open_to_more, key=lambda player: (given[player.name], -player.has, player.name))
        given[chosen.name] += 1
    return given


def ranks(curves: Mapping[str, Mapping[int, float]], mode: str) -> dict[str, float]:
    """The rank of each trial in its rung: the share of those who came as far that were better there, 0.0 for the best.

    Args:
        curves: for each trial, its values of the sweep's metric by finished steps.
        mode: "min" or "max".
    """
    sign = 1.0 if mode == "min" else -1.0
    found = {}
    for name, curve in curves.items():
        finite = [step for step, value in curve.items() if math.isfinite(value)]
        if not finite:
            found[name] = 1.0
            continue
        rung = max(finite)
        others = [other[rung] for other in curves.values() if rung in other]
        found[name] = sum(sign * value < sign * curve[rung] for value in others) / len(others)
    return found


def workers_worth(bundles: Iterable[Mapping[str, float]], of_worker: Mapping[str, float]) -> int:
    """How many workers would have to go to make room for these bundles; 0 where that does not help."""
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return max((math.ceil(total.get(name, 0.0) / amount - 1e-9) for name, amount in of_worker.items() if amount), default=0)


def room_for(available: Mapping[str, float], of_worker: Mapping[str, float]) -> int:
    """How many workers fit into what is available."""
    return min((int(available.get(name, 0.0) / amount + 1e-9) for name, amount in of_worker.items() if amount), default=0)


@dataclass
class Waiting:
    """Those who wait for room, without those whom room has not helped."""

    _had_room_since: dict[str, float] = field(default_factory=dict)

    def look(self, needs: Mapping[str, int], num_free: int, now: float) -> list[int]:
        """The needs of those who wait, in workers.

        Args:
            needs: workers' worth of room that each of those who wait needs, by any identity.
            num_free: workers for which there is room now.
            now: monotonic time in seconds.
        """
        since = self._had_room_since
        self._had_room_since = {name: since.get(name, now) for name, need in needs.items() if need <= num_free}
        return [need for name, need in needs.items() if need and now - self._had_room_since.get(name, now) <= NO_HELP_S]
