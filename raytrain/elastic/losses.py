"""When has a run lost too many workers, or one row too often? Pure decisions of the controller.

Only losses without progress count, so that a long run on spot machines is not ended by its hundredth preemption.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SAME_STEP_LIMIT = 3


@dataclass
class LossBudget:
    """Counts the workers that were lost in a row without a finished step in between."""

    max_failures: int
    losses: int = 0
    step: int = -1

    def lose(self, finished_steps: int) -> bool:
        """Notes a loss; returns whether the run may go on."""
        if finished_steps > self.step:
            self.step, self.losses = finished_steps, 0
        self.losses += 1
        return self.losses <= self.max_failures


@dataclass
class Crashes:
    """Processes that died in the same step: if the same logical worker was with each of them, its rows are to blame."""

    step: int = -1
    _held: list[frozenset[int]] = field(default_factory=list)

    def note(self, step: int, held: frozenset[int]) -> frozenset[int]:
        """Notes that a process died in `step`, while it held some logical workers.

        Returns:
            the logical workers to blame, once there have been enough such deaths; else none.
        """
        if step != self.step:
            self.step, self._held = step, []
        self._held.append(held)
        recent = self._held[-SAME_STEP_LIMIT:]
        return frozenset.intersection(*recent) if len(recent) == SAME_STEP_LIMIT else frozenset()
