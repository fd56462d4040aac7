"""How many workers should be asked for, and when has a run lost too many? Pure decisions of the controller.

A missing worker is asked for by a placement group of its own, which stays pending until there is room: that is also the
demand that the autoscaler sees, and it respects what others use. So nothing here counts nodes.
"""

from __future__ import annotations

from dataclasses import dataclass


def num_to_ask_for(num_running: int, num_asked: int, num_finished: int, max_workers: int) -> int:
    """Workers to ask for now; none once one of them has finished the run."""
    return 0 if num_finished else max(0, max_workers - num_running - num_asked)


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


def shortage(asked: dict[str, float], num_workers: int, total: dict[str, float]) -> str:
    """What a cluster lacks for `num_workers` workers, in words, for example "asked for 4 CPU, the cluster has 2"."""
    parts = []
    for name, amount in asked.items():
        if amount:
            parts.append(f"asked for {amount * num_workers:g} {name}, the cluster has {total.get(name, 0.0):g}")
    return "; ".join(parts)
