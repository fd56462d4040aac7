"""Does a newcomer bring more than it costs? Nodes that come and go within seconds are let in after longer and longer waits.

Pure: times are arguments, in seconds. A join makes all others pause for up to about half a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SHORT_LIFE_S = 5.0
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 300.0


@dataclass
class Flapping:
    """The short lives of late, by node."""

    _admitted: dict[str, tuple[str, float]] = field(default_factory=dict)
    _short_lives: dict[str, int] = field(default_factory=dict)

    def admit(self, worker: str, node: str, now: float) -> None:
        self._admitted.setdefault(worker, (node, now))

    def lose(self, worker: str, now: float) -> None:
        """Also for a worker that was never admitted, which cost nobody anything."""
        node, since = self._admitted.pop(worker, ("", 0.0))
        if node:
            self._short_lives[node] = self._short_lives.get(node, 0) + 1 if now - since < SHORT_LIFE_S else 0

    def wait_s(self, node: str) -> float:
        """How long a newcomer from this node waits at the door. A first short life is bad luck, and costs it nothing."""
        repeated = self._short_lives.get(node, 0) - 1
        doublings = min(repeated - 1, 16)  # of a node that has flapped for days
        return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**doublings) if repeated > 0 else 0.0
