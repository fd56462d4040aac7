"""The actor that keeps the run's event log: everybody appends to it, the driver asks it for what is new."""

from __future__ import annotations

from raytrain.events.kinds import Event, StateRestored, StepsDone
from raytrain.events.log import EventLog
from raytrain.rundir import RunDir


class EventSink:
    """Runs on the driver's node, without CPUs."""

    def __init__(self, storage: str, name: str) -> None:
        self._log = EventLog(RunDir.at(storage, name))
        self._finished_steps = 0

    def opened_at(self) -> int:
        """How many events the log had before this driver."""
        return self._log.opened_at

    def append(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, StepsDone):
                self._finished_steps = max(self._finished_steps, event.first_step + len(event.losses))
            elif isinstance(event, StateRestored):
                self._finished_steps = max(self._finished_steps, event.step)
        self._log.append(events)

    def finished_steps(self) -> int:
        """The most steps that this driver has seen finished."""
        return self._finished_steps

    def since(self, number: int) -> list[Event]:
        return self._log.since(number)

    def close(self) -> None:
        self._log.close()
