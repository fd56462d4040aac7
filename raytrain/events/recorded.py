"""Which steps does the log of a run hold already? So that a step is written once, however often a worker sends it.

Pure bookkeeping of step numbers, in the process that writes the log. What the steps say is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from raytrain.events.kinds import Event, StateRestored, StepsDone


class RecordedSteps:
    """Which steps are in the log: all below a height, and perhaps some beyond a gap.

    A gap can arise from a message of a worker that died: what it sent arrives late, or never. Since a step is the same
    whoever reports it, the first report counts.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self._height = 0
        self._beyond: set[int] = set()
        for event in events:
            self.only_new(event)

    def only_new(self, event: Event) -> list[Event]:
        """The event, or the parts of it whose steps are not in the log; they are from now on."""
        if isinstance(event, StateRestored):
            self._height, self._beyond = event.step, set()
        if not isinstance(event, StepsDone):
            return [event]
        new = [i for i in range(len(event.losses)) if self._add(event.first_step + i)]
        if len(new) == len(event.losses):
            return [event] if new else []
        return [_cut(event, start, stop) for start, stop in _stretches(new)]

    def _add(self, step: int) -> bool:
        if step < self._height or step in self._beyond:
            return False
        self._beyond.add(step)
        while self._height in self._beyond:
            self._beyond.remove(self._height)
            self._height += 1
        return True


def _stretches(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """[0, 1, 4] -> (0, 2), (4, 5)."""
    first = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[first], numbers[i - 1] + 1
            first = i


def _cut(event: StepsDone, start: int, stop: int) -> StepsDone:
    names = ("losses", "weights", "rows", "learning_rates", "finished", "data_waits", "row_ids")
    lists: dict[str, Any] = {name: getattr(event, name) for name in names}
    parts = {name: values and values[start:stop] for name, values in lists.items()}
    return replace(event, first_step=event.first_step + start, **parts)
