"""Into which classes does the wall time of a run fall? The values; how events become them is `bookkeeping`.

A driver's session begins at RunStarted and ends at RunEnded; where that is missing, since the driver was killed, at the
last event before the next RunStarted; of a run that still goes on, at a `now` that the caller gives. Wall time is the sum
of the sessions: time between two drivers is no part of it. Runs in any process that shows a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Seconds = dict[str, float]
"""Seconds by class: some or all fields of a `Ledger`."""


@dataclass(frozen=True)
class Ledger:
    """Seconds of wall time by class."""

    starting_s: float = 0.0
    """From RunStarted to the first generation of each session."""
    training_s: float = 0.0
    """On steps that were finished, and not done before."""
    data_wait_s: float = 0.0
    """The leader waited for its rows."""
    evaluation_s: float = 0.0
    checkpoint_stall_s: float = 0.0
    """Training stood still for a checkpoint; also from the last step until the last checkpoint was written."""
    detecting_s: float = 0.0
    """Until a loss was noticed, beyond the time that a step takes."""
    reforming_s: float = 0.0
    """No generation trained, for no other reason that is known."""
    waiting_s: float = 0.0
    """There were fewer workers than the run needs."""
    redoing_s: float = 0.0
    """On steps in flight that were lost, and on steps that were done again after an older checkpoint was restored."""
    stopping_s: float = 0.0
    """From the last step, or the checkpoint after it, to RunEnded."""

    @property
    def wall_s(self) -> float:
        return math.fsum(self.seconds().values())

    @property
    def goodput(self) -> float:
        """Training / wall time, 0 to 1; 0 before there is any."""
        wall_s = self.wall_s
        return self.training_s / wall_s if wall_s else 0.0

    def seconds(self) -> Seconds:
        """All classes, in the order of the fields."""
        return dict(vars(self))

    def known(self) -> Seconds:
        """The classes that have any time."""
        return {name: seconds for name, seconds in vars(self).items() if seconds}


TITLES = {
    "starting_s": "starting",
    "training_s": "training",
    "data_wait_s": "data wait",
    "evaluation_s": "evaluation",
    "checkpoint_stall_s": "checkpoint stall",
    "detecting_s": "detecting",
    "reforming_s": "re-forming",
    "waiting_s": "waiting for workers",
    "redoing_s": "redoing",
    "stopping_s": "stopping",
}
"""The classes in words."""


def settle(settled: Ledger, claims: Ledger, stretch_s: float, rest: str) -> Ledger:
    """The ledger with a stretch of time more: to each claim as much of it as there is left, what remains to `rest`."""
    seconds = settled.seconds()
    spend(seconds, claims.known(), stretch_s, rest)
    return Ledger(**seconds)


def spend(settled: Seconds, claims: Seconds, stretch_s: float, rest: str) -> None:
    """As `settle`, in place: for many stretches in a row."""
    left_s = max(0.0, stretch_s)
    for name, claimed_s in claims.items():
        part_s = min(claimed_s, left_s)
        settled[name] += part_s
        left_s -= part_s
    settled[rest] += left_s
