"""The actor that keeps the run's event log: everybody appends to it, the driver asks it for what is new."""

from __future__ import annotations

from raytrain.events.kinds import Event
from raytrain.events.log import EventLog
from raytrain.rundir import RunDir


class EventSink:
    """Runs on the driver's node, without CPUs. Ray starts it again if it dies: the log is where it was."""

    def __init__(self, storage: str, name: str) -> None:
        self._log = EventLog(RunDir.at(storage, name))

    def opened_at(self) -> int:
        """How many events the log had before this driver."""
        return self._log.opened_at

    def append(self, events: list[Event]) -> None:
        self._log.append(events)

    def since(self, number: int) -> list[Event]:
        return self._log.since(number)

    def close(self) -> None:
        self._log.close()
