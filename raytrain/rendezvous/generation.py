"""What passes between the workers and the rendezvous: a worker at the door, a generation, and what its members should do.

Plain values. The decisions about them are made in `state`.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

NO_STATE = -1
"""The step of an entrant that has no training state in memory yet."""


@dataclass(frozen=True)
class Entrant:
    """A worker at the door.

    Args:
        worker: its identity, for as long as its process lives.
        step: finished steps of the state in its memory, or NO_STATE.
        store: host and port of the TCPStore that it serves.
        node: the address of its node, for people.
        pid: its process.
        node_id: of its node.
        is_saved: whether a verified checkpoint of this step is on storage.
        after: number of the generation that it comes from.
    """

    worker: str
    step: int
    store: tuple[str, int]
    node: str = ""
    pid: int = 0
    node_id: str = ""
    is_saved: bool = False
    after: int = 0


@dataclass(frozen=True)
class Generation:
    """Workers that train together in one process group, in the order of their ranks; the first one leads."""

    number: int
    members: tuple[Entrant, ...]
    cause: str
    """"start", "loss", "join" or "drain"."""
    waited_s: float = 0.0
    """Seconds for which there were too few workers at the door."""
    patience: int = 1
    """By what the limit of collectives is multiplied: it doubles when a group broke although everybody lived."""
    reached: int = NO_STATE
    """The most finished steps that anybody has told of; more than the members have, where all who had them are gone."""

    def has(self, worker: str) -> bool:
        return any(member.worker == worker for member in self.members)

    def rank_of(self, worker: str) -> int:
        return [member.worker for member in self.members].index(worker)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self._packed,)

    @cached_property
    def _packed(self) -> bytes:
        """Pickled once, though each member is told: with a thousand members it takes milliseconds."""
        return pickle.dumps([getattr(self, field.name) for field in fields(self)])


def _unpacked(packed: bytes) -> Generation:
    return Generation(*pickle.loads(packed))


NOBODY = Generation(0, (), "")
"""The answer to a worker that was taken for dead while it waited: it may enter again."""


@dataclass(frozen=True)
class Signals:
    """What some know and all members must act on at the same step boundary."""

    gather: bool = False
    """Come to the door: newcomers wait there, or some are to leave."""
    save: bool = False
    """All are to leave: save the state first."""
    stop: bool = False
    """Save, and end the run."""
    leave: bool = False
    """Some are to leave, and time is short: what takes longer than a step is broken off."""
