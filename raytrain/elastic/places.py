"""Where may a worker live? A place is the room of one worker on some node, asked for when it is made.

A run on its own asks for a placement group per worker. A run that shares a cluster with others (`Share`) has its smallest
group reserved, in bundles of one placement group that belongs to somebody else; what it has beyond these are placement
groups of its own, named so that whoever deals the cluster out knows them. Runs in the controller's thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

EXTRA = "raytrain-extra"
"""How the names of placement groups begin that a run would give back if others needed them."""


@dataclass(frozen=True)
class Share:
    """A run's part of a cluster that it shares with others.

    Args:
        broker: actor handle: `hold(claim)`, `changed(name, known)` and `leave(name)`, see `Quota`.
        name: of the run, among all that share this broker.
        reserved: the placement group with the places of its smallest group.
        bundles: their indices in it.
    """

    broker: Any
    name: str
    reserved: Any
    bundles: tuple[int, ...]

    @property
    def extra_prefix(self) -> str:
        """How the names of this run's extra placement groups begin."""
        return extra_prefix(self.name)


def extra_prefix(name: str) -> str:
    """How the names of the extra placement groups of run `name` begin."""
    return f"{EXTRA}/{name}/"


class Place:
    """The room of one worker.

    Args:
        group: a placement group.
        bundle: index of the worker's bundle in it.
        on_return: called when the place is given back.
        is_reserved: whether it stays reserved for the run then.
    """

    def __init__(self, group: Any, bundle: int, on_return: Callable[[], None], is_reserved: bool = False) -> None:
        self._group, self._bundle, self._on_return = group, bundle, on_return
        self.is_reserved = is_reserved

    @property
    def is_there(self) -> bool:
        """Whether the room is ours; `placement_group.wait(0)` would deny it now and then (Ray 2.60)."""
        return bool(placement_group_table(self._group).get("state") == "CREATED")

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Puts an actor there."""
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundle)

    def give_back(self) -> None:
        """May be called again."""
        self._on_return, on_return = _nothing, self._on_return
        on_return()


class Places:
    """Hands out places: the reserved ones first.

    Args:
        resources: of one worker, {"CPU": 1.0}.
        share: None for a run on its own.
    """

    def __init__(self, resources: dict[str, float], share: Share | None = None) -> None:
        self._resources, self._share = resources, share
        self._free = list(share.bundles) if share else []

    def take(self) -> Place:
        if self._share and self._free:
            bundle = self._free.pop(0)
            return Place(self._share.reserved, bundle, lambda: self._free.append(bundle), is_reserved=True)
        name = self._share.extra_prefix + uuid.uuid4().hex if self._share else ""
        group = placement_group([self._resources], name=name)
        return Place(group, 0, lambda: remove_placement_group(group))


def _nothing() -> None:
    pass
