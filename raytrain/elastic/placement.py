"""Where does a worker run? Slots: the resources of one worker on some node, each requested by a placement group.

A placement group stays pending until there is room, which is also the demand that the autoscaler sees. A run of its own has
a placement group per worker. A run that shares a cluster with others (`ResourceLease`) has its smallest group reserved, in
bundles of one placement group that belongs to the trial; what it has beyond these are placement groups of its own, named so
that the broker recognises them. Runs in the controller's thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

EXTRA = "raytrain-extra"
"""Prefix of the names of placement groups that a run gives back when others need them."""


@dataclass(frozen=True)
class ResourceLease:
    """A run's resources in a cluster that it shares with others.

    Args:
        broker: actor handle: `request(demand)`, `changed(name, known)` and `leave(name)`, see `membership.Allocation`.
        name: of the run, among all that share this broker.
        reserved: the placement group with the slots of its smallest group.
        bundles: their indices in it.
    """

    broker: Any
    name: str
    reserved: Any
    bundles: tuple[int, ...]

    @property
    def extra_prefix(self) -> str:
        return extra_prefix(self.name)


def extra_prefix(name: str) -> str:
    """Prefix of the names of the extra placement groups of run `name`."""
    return f"{EXTRA}/{name}/"


class Slot:
    """The resources of one worker.

    Args:
        group: a placement group.
        bundle: index of the worker's bundle in it.
        on_release: called when the slot is released.
        is_reserved: whether it stays reserved for the run then.
    """

    def __init__(self, group: Any, bundle: int, on_release: Callable[[], None], is_reserved: bool = False) -> None:
        self._group, self._bundle, self._on_release = group, bundle, on_release
        self._is_released = False
        self.is_reserved = is_reserved

    @property
    def is_placed(self) -> bool:
        return is_placed(self._group)

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Schedules an actor there."""
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundle)

    def release(self) -> None:
        """May be called again."""
        if not self._is_released:
            self._is_released = True
            self._on_release()


class Slots:
    """Requests slots: the reserved ones first.

    Args:
        resources: of one worker, {"CPU": 1.0}.
        lease: None for a run of its own.
    """

    def __init__(self, resources: dict[str, float], lease: ResourceLease | None = None) -> None:
        self._resources, self._lease = resources, lease
        self._free = list(lease.bundles) if lease else []

    def request(self) -> Slot:
        if self._lease and self._free:
            bundle = self._free.pop(0)
            return Slot(self._lease.reserved, bundle, lambda: self._free.append(bundle), is_reserved=True)
        name = self._lease.extra_prefix + uuid.uuid4().hex if self._lease else ""
        group = placement_group([self._resources], name=name)
        return Slot(group, 0, lambda: remove_placement_group(group))


class PlacementRequests:
    """How many workers fit now, and since when: slots are requested, and held while they are placed.

    Args:
        resources: of one worker.
    """

    def __init__(self, resources: dict[str, float]) -> None:
        self._slots, self._requested = Slots(resources), list[Slot]()
        self._num_placed, self._since = -1, 0.0

    def request(self, num: int) -> None:
        """Requests slots, or releases some, so that there are `num`."""
        if num != len(self._requested):
            self._num_placed = -1
        self._requested += [self._slots.request() for _ in range(num - len(self._requested))]
        while len(self._requested) > num:
            self._requested.pop().release()

    def check(self, now: float) -> tuple[int, float]:
        """How many of them are placed, and for how many seconds it has been so many."""
        num_placed = sum(slot.is_placed for slot in self._requested)
        if num_placed != self._num_placed:
            self._num_placed, self._since = num_placed, now
        return num_placed, now - self._since


def is_placed(group: Any) -> bool:
    """Asks the table, since `placement_group.wait(0)` now and then misses a group that is placed (Ray 2.60)."""
    return bool(placement_group_table(group).get("state") == "CREATED")
