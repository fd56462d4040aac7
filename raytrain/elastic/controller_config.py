"""What the controller is told about a run, and the connections that it shares with the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raytrain.elastic.placement import ResourceLease


@dataclass(frozen=True)
class ControllerConfig:
    """Travels inside Ray Train's `train_loop_config`, under the key `CONTROLLER_CONFIG`.

    Args:
        min_workers, max_workers: the elastic range.
        max_failures: failures in a row without progress that the run survives.
        start_timeout_s: seconds to wait for the resources of `min_workers`, before there ever were enough.
        wait_timeout_s: the same afterwards.
        slow_timeout_s: seconds that a worker's process may take to start.
        num_logical: logical workers of the run.
        rendezvous: actor handle of `raytrain.rendezvous.actor.RendezvousActor`.
        writer: actor handle of the event writer: `append(events)`.
        lease: the run's resources in a cluster that it shares with other trials of a sweep.
        spares: workers beyond `max_workers` that wait to take the place of lost ones.
    """

    min_workers: int
    max_workers: int
    max_failures: int
    start_timeout_s: float
    wait_timeout_s: float
    slow_timeout_s: float
    num_logical: int
    rendezvous: Any
    writer: Any
    lease: ResourceLease | None = None
    spares: int = 0


CONTROLLER_CONFIG = "controller_config"


def worker_name(serial: int) -> str:
    """The identity of the worker that was started as number `serial` of a run."""
    return f"w{serial}"
