"""A worker on its way: from the request for its resources to a running training function, without blocking anybody.

The controller looks at each joiner once per poll. A joiner has its place until it is let go.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError

from raytrain.elastic.internals import RayTrainWorker, Worker, bundle_to_remote_args
from raytrain.elastic.places import Place
from raytrain.elastic.wiring import worker_name


class JoinFailed(Exception):
    """The process of a joiner died before its training function ran; `preempted` if its node was taken away."""

    def __init__(self, message: str, preempted: bool) -> None:
        super().__init__(message, preempted)
        self.preempted = preempted

    def __str__(self) -> str:
        return str(self.args[0])


class Joiner:
    """A worker that comes.

    Args:
        serial: number of the worker in the run.
        resources: of the worker, {"CPU": 1.0}.
        room: where it is to live.
        limit_s: what its process may take to start, once it has its place.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        serial: int,
        resources: dict[str, float],
        room: Place,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.serial, self._resources, self._room, self._limit_s, self._clock = serial, resources, room, limit_s, clock
        self.name = worker_name(serial)
        self._placed_at = 0.0
        self._actor: Any = None
        self._started: list[Any] = []

    @property
    def is_placed(self) -> bool:
        return self._actor is not None

    @property
    def is_extra(self) -> bool:
        """Whether somebody else can use its place once it is let go."""
        return not self._room.is_reserved

    def place(self) -> bool:
        """Whether the room has just become ours; the process starts then."""
        if self._actor is not None or not self._room.is_there:
            return False
        remote = ray.remote(**bundle_to_remote_args(self._resources))(RayTrainWorker)
        self._actor = remote.options(scheduling_strategy=self._room.strategy).remote()
        self._placed_at = self._clock()
        return True

    def launch(self, train_context: dict[str, Any], train_function: Any) -> None:
        """Sends the three calls that start the training function; an actor takes them in order."""
        self._started = [
            self._actor.get_metadata.remote(),
            self._actor.init_train_context.remote(**train_context),
            self._actor.run_train_fn.remote(train_function),
        ]

    def poll(self) -> Worker | None:
        """The worker, once its training function runs.

        Raises:
            JoinFailed: its process died on the way, or takes too long.
        """
        if not self._started:
            return None
        done, _ = ray.wait(self._started, num_returns=len(self._started), timeout=0)
        if len(done) < len(self._started):
            if self._clock() - self._placed_at > self._limit_s:
                raise JoinFailed(f"its process did not start within {self._limit_s:g} s", preempted=False)
            return None
        try:
            metadata, *_ = ray.get(self._started)
        except RayActorError as error:
            raise JoinFailed(str(error), getattr(error, "preempted", False)) from error
        return Worker(self._actor, metadata, self._resources)

    def let_go(self) -> None:
        """Gives everything back."""
        if self._actor is not None:
            ray.kill(self._actor)
        self._room.give_back()
