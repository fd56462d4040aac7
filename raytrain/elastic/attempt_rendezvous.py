"""The rendezvous of one attempt: the same as ever, but it forms one generation only, of exactly the attempt's workers.

So whoever has lost a peer waits at the door, with nobody to train with, until the attempt ends; and where a collective
failed though everybody lives, the same workers go on together. It also keeps the roll, since nobody else knows the
workers: where each of them runs, and whether its function has ended. An actor on the driver's node, as its base class.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ray

from raytrain.rendezvous.actor import RendezvousActor, Survey
from raytrain.rendezvous.generation import NO_STATE, Entrant, Generation
from raytrain.rendezvous.vitals import Answer, Beat, Limits


@dataclass(frozen=True)
class Report:
    """What the driver wants to know of an attempt.

    Args:
        survey: as in every run.
        step: the most finished steps that a worker of this attempt has told of; NO_STATE if none has.
        generation: number of the latest one; 0 if none has formed.
        known: address of the node and process of each worker that has begun.
        ended: workers whose functions have ended; the value says whether by an error.
    """

    survey: Survey = field(default_factory=lambda: Survey({}, frozenset(), (), NO_STATE))
    step: int = NO_STATE
    generation: int = 0
    known: dict[str, tuple[str, int]] = field(default_factory=dict)
    ended: dict[str, bool] = field(default_factory=dict)


class AttemptRendezvous(RendezvousActor):
    """See the module.

    Args:
        num_workers: of the attempt.
        limits: when a silent or stuck worker is given up.
        reached: the most finished steps that workers of the attempts before have told of.
        after: number of the latest generation of the attempts before.
        is_reborn: see the base class.
    """

    def __init__(
        self,
        num_workers: int,
        limits: Limits | None = None,
        reached: int = NO_STATE,
        after: int = 0,
        is_reborn: bool | None = None,
    ) -> None:
        super().__init__(num_workers, limits, is_reborn)
        self._state.reached, self._after = reached, after
        self._step = NO_STATE
        self._known: dict[str, tuple[str, int]] = {}
        self._ended: dict[str, bool] = {}

    async def begin(self, worker: str, node: str, pid: int, handle: Any) -> None:
        """The function of `worker` begins; it will enter soon."""
        self._known[worker] = node, pid
        self._handles[worker] = handle
        await self.start(worker)

    async def end(self, worker: str, has_raised: bool) -> None:
        """The function of `worker` has ended: its silence says nothing from now on."""
        self._ended[worker] = has_raised
        self._vitals.forget(worker)

    async def beat(self, beat: Beat, handle: Any = None) -> Answer:
        self._step = max(self._step, beat.step)
        return await super().beat(beat, handle)

    async def enter(self, entrant: Entrant, handle: Any) -> Generation | None:
        self._step = max(self._step, entrant.step)
        return await super().enter(replace(entrant, after=max(entrant.after, self._after)), handle)

    async def report(self) -> Report:
        """The state of things, for the driver."""
        number = self._state.generation.number
        return Report(await self.survey(), self._step, number, dict(self._known), dict(self._ended))

    async def kill_all(self) -> None:
        """Ends the processes of all workers that have begun."""
        for handle in self._handles.values():
            ray.kill(handle)
