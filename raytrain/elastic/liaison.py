"""What does the rendezvous know, and what must it be told? The controller's line to it.

It makes the control loop wait only where a decision needs the state of this moment, and then for a limited time.

The rendezvous may be away for a while, since Ray starts it again when it dies: what was known before stays, and what it
must know is said again.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from raytrain.plan.layout import held_by
from raytrain.rendezvous.actor import Survey

FRESH_LIMIT_S = 2.0


class Liaison:
    """Asks for surveys, and passes requests to leave on.

    Args:
        rendezvous: handle of the `RendezvousActor`.
        num_logical: logical workers of the run.
    """

    def __init__(self, rendezvous: Any, num_logical: int) -> None:
        self._rendezvous, self._num_logical = rendezvous, num_logical
        self._asked: Any = None
        self._requests: dict[str, Any] = {}
        self._unheard_losses: dict[str, Any] = {}
        self._survey = Survey({}, frozenset(), (), 0)
        self._held: dict[str, frozenset[int]] = {}

    @property
    def step(self) -> int:
        """The most finished steps that any worker has told of."""
        return max(0, self._survey.step)

    @property
    def given_up(self) -> dict[str, str]:
        """Workers that were given up, and why."""
        return self._survey.given_up

    @property
    def left(self) -> frozenset[str]:
        """Workers that have left as they were asked to."""
        return self._survey.left

    def held(self, worker: str) -> frozenset[int]:
        """The logical workers that `worker` held when it was last heard of; none if it never trained."""
        return self._held.get(worker, frozenset())

    def tell_start(self, worker: str) -> None:
        self._rendezvous.start.remote(worker)

    def tell_loss(self, worker: str) -> None:
        self._unheard_losses[worker] = self._rendezvous.lose.remote(worker)
        self._requests.pop(worker, None)

    def tell_withdrawal(self, worker: str) -> None:
        """A worker that was to come does not."""
        self._rendezvous.leave.remote(worker)

    def tell_end_of_patience(self) -> None:
        self._rendezvous.give_up.remote()

    def look(self) -> None:
        """Takes the survey that was asked for last time, if it is there, and asks for the next one."""
        self._repeat_losses()
        if self._asked is None or ray.wait([self._asked], timeout=0)[0]:
            self._take(0.0)
            self._asked = self._rendezvous.survey.remote()

    def look_closely(self) -> None:
        """Waits for a survey of this moment, for a short while."""
        self._asked = self._rendezvous.survey.remote()
        self._take(FRESH_LIMIT_S)

    def may_go(self, worker: str) -> bool:
        """Asks that `worker` leaves after its step; whether it has no part in the run, so that it can go at once."""
        request = self._requests.get(worker)
        if request is None:
            self._requests[worker] = self._rendezvous.leave.remote(worker)
            return False
        if not ray.wait([request], timeout=0)[0]:
            return False
        del self._requests[worker]  # it is said again: a rendezvous that was started anew does not know
        try:
            return not ray.get(request)
        except RayActorError:
            return False

    def _repeat_losses(self) -> None:
        for worker, told in list(self._unheard_losses.items()):
            if not ray.wait([told], timeout=0)[0]:
                continue
            try:
                ray.get(told)
                del self._unheard_losses[worker]
            except RayActorError:
                self._unheard_losses[worker] = self._rendezvous.lose.remote(worker)

    def _take(self, limit_s: float) -> None:
        if self._asked is None:
            return
        try:
            self._survey = ray.get(self._asked, timeout=limit_s)
        except (RayActorError, GetTimeoutError):
            return
        finally:
            self._asked = None
        members = self._survey.members
        for rank, worker in enumerate(members):
            self._held[worker] = frozenset(held_by(rank, len(members), self._num_logical))
