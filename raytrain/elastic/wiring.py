"""What the controller is told about a run, and the connections that it shares with the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wiring:
    """Travels inside Ray Train's `train_loop_config`, under the key `WIRING`.

    Args:
        min_workers, max_workers: the elastic range.
        max_failures: workers that may be lost in a row without progress.
        start_timeout_s: seconds to wait for the resources of `min_workers`.
        rendezvous: actor handle of `raytrain.rendezvous.actor.RendezvousActor`.
        sink: actor handle of the event sink: `append(events)` and `finished_steps()`.
    """

    min_workers: int
    max_workers: int
    max_failures: int
    start_timeout_s: float
    rendezvous: Any
    sink: Any


WIRING = "wiring"


def worker_name(serial: int) -> str:
    """The identity of the worker that was started as number `serial` of a run."""
    return f"w{serial}"
