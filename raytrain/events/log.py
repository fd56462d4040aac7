"""Where are the events of a run stored? In `events.jsonl` of its directory, one line each, append-only.

`EventLog` writes the file; `EventWriter` is the same as a Ray actor on the driver's node. `read` is for viewers, in any
process, also during the run. Each step is written once, even if several workers report it, and each event once, even if it
is delivered twice: its line names its sender and its number there. What an event means is decided elsewhere (`view`,
`goodput`, `curve`).
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from raytrain.events.kinds import Event, StateRestored, StepsDone, to_json
from raytrain.events.lines import DELIVERY, LocalFile, LogFile, ObjectFile, parse_delivered, parse_line
from raytrain.rundir import EVENTS, RunDir


@dataclass(frozen=True)
class Batch:
    """A part of the events of one sender, which numbers them from 0.

    Args:
        sender: unique, also over restarts of the run.
        first: number of the first event of the batch.
        oldest: number of the oldest event that the sender still has; earlier ones are not coming any more.
    """

    sender: str
    first: int
    oldest: int
    events: list[Event]


@dataclass(frozen=True)
class Receipt:
    """Which events of a sender the log has.

    Args:
        received: events with lower numbers have arrived, perhaps in memory only; the sender goes on with this one.
        durable: events with lower numbers are on the storage.
    """

    received: int
    durable: int


class EventLog:
    """The events of a run, numbered from 0 through the whole file, including lines that other processes append.

    A full disk or a transient storage error loses nothing while this process lives: lines stay in memory and are retried;
    `failure` holds the error until they are written. If it dies, a sender that keeps its events until a receipt says that
    they are durable loses nothing.

    Args:
        run_dir: the run's directory; created if missing.
        clock: Unix time in seconds.
    """

    def __init__(self, run_dir: RunDir, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._deliveries, self._events = _Deliveries(), list[Event]()
        for event, delivery in _read(run_dir):
            self._deliveries.note(delivery)
            self._events.append(_without_rows(event))
        self._first_kept = 0
        self._steps = _RecordedSteps(self._events)
        self._file: LogFile = LocalFile(run_dir) if run_dir.is_local else ObjectFile(run_dir, clock)
        self.opened_at = len(self._events)
        """Number of events before this process, so the number of the first one that it appends."""
        self.failure: OSError | None = None
        """Why the newest lines are not written yet; None if they are."""

    def append(self, events: Iterable[Event]) -> None:
        """Appends events. Sets missing times, leaves out steps that are already recorded."""
        self._add((event, "") for event in events)

    def deliver(self, batch: Batch, durably: bool = False) -> Receipt:
        """Appends those events of a batch that have not arrived before; none if earlier ones are missing.

        Args:
            batch: of one sender.
            durably: writes at once what is in memory only.
        """
        self._add(self._deliveries.take(batch), durably)
        return self._deliveries.receipt(batch.sender, self._file.is_written)

    def since(self, number: int) -> list[Event]:
        """Events `number`, `number + 1`, ..., without row ids. Earlier ones are dropped from memory: there is one reader."""
        self._write()
        self._take_others()
        del self._events[: max(0, number - self._first_kept)]
        self._first_kept = max(self._first_kept, number)
        return list(self._events)

    def close(self) -> None:
        """Writes pending lines. Raises OSError if that fails."""
        self._file.close()
        self.failure = None

    def _add(self, events: Iterable[tuple[Event, str]], durably: bool = False) -> None:
        """Appends events with their deliveries; the delivery is that of the last line if an event is cut in several."""
        now, new, lines = self._clock(), list[Event](), list[str]()
        for event, delivery in events:
            parts = [_timed(part, now) for part in self._steps.only_new(event)]
            values = list(map(to_json, parts))
            if values and delivery:
                values[-1][DELIVERY] = delivery
            new += parts
            lines += [json.dumps(value) + "\n" for value in values]
        self._file.add("".join(lines).encode())
        self._write(durably)
        self._take_others()
        self._events.extend(map(_without_rows, new))

    def _take_others(self) -> None:
        found = map(parse_line, self._file.take_others().split(b"\n"))
        self._events += [_without_rows(event) for event in found if event is not None]

    def _write(self, durably: bool = False) -> None:
        try:
            self._file.write(durably)
            self.failure = None
        except OSError as error:
            self.failure = error


class EventWriter:
    """The event log as a Ray actor: every process appends, the driver polls. Ray restarts it: its state is the file."""

    def __init__(self, storage: str, name: str) -> None:
        self._log = EventLog(RunDir.at(storage, name))

    def opened_at(self) -> int:
        """Number of events before this driver."""
        return self._log.opened_at

    def append(self, events: list[Event]) -> None:
        self._log.append(events)

    def deliver(self, batch: Batch, durably: bool) -> Receipt:
        return self._log.deliver(batch, durably)

    def since(self, number: int) -> list[Event]:
        return self._log.since(number)

    def close(self) -> None:
        self._log.close()


def read(run_dir: RunDir) -> Iterator[Event]:
    """The events of a run, oldest first; empty if it has no log yet.

    Skips lines of an unknown version and an incomplete last line.
    """
    return (event for event, _ in _read(run_dir))


def _read(run_dir: RunDir) -> Iterator[tuple[Event, str]]:
    """The events of `read` with their deliveries."""
    try:
        stream = run_dir.filesystem.open_input_stream(run_dir.child(EVENTS))
    except FileNotFoundError:
        return
    with io.BufferedReader(stream) as lines:
        for line in lines:
            event, delivery = parse_delivered(line)
            if event is not None:
                yield event, delivery


def _timed(event: Event, now: float) -> Event:
    return event if event.time else replace(event, time=now)


def _without_rows(event: Event) -> Event:
    return replace(event, row_ids=None) if isinstance(event, StepsDone) and event.row_ids else event


class _RecordedSteps:
    """Which steps the log contains: all below `_height`, and possibly some beyond a gap.

    A gap occurs when the message of a failed worker arrives late or never. Every worker reports a step with the same
    values, so the first report is kept.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self._height = 0
        self._beyond: set[int] = set()
        for event in events:
            self.only_new(event)

    def only_new(self, event: Event) -> list[Event]:
        """The event, or its parts with steps that are not recorded yet. Marks them as recorded."""
        if isinstance(event, StateRestored):
            self._height, self._beyond = event.step, set()
        if not isinstance(event, StepsDone):
            return [event]
        new = [i for i in range(len(event.losses)) if self._add(event.first_step + i)]
        if len(new) == len(event.losses):
            return [event] if new else []
        return [_slice(event, start, stop) for start, stop in _ranges(new)]

    def _add(self, step: int) -> bool:
        if step < self._height or step in self._beyond:
            return False
        self._beyond.add(step)
        while self._height in self._beyond:
            self._beyond.remove(self._height)
            self._height += 1
        return True


class _Deliveries:
    """Which events of each sender have arrived, and which of them are on the storage."""

    def __init__(self) -> None:
        self._received: dict[str, int] = {}
        self._durable: dict[str, int] = {}

    def note(self, delivery: str) -> None:
        """A line on the storage has this delivery, or none."""
        sender, _, number = delivery.rpartition(":")
        if sender:
            self._received[sender] = int(number) + 1

    def take(self, batch: Batch) -> list[tuple[Event, str]]:
        """The events that have not arrived before, with their deliveries; marks them as arrived."""
        first = max(self._received.get(batch.sender, 0), batch.oldest)
        new = batch.events[first - batch.first :] if batch.first <= first else []
        self._received[batch.sender] = first + len(new)
        return [(event, f"{batch.sender}:{number}") for number, event in enumerate(new, first)]

    def receipt(self, sender: str, all_are_written: bool) -> Receipt:
        if all_are_written:
            self._durable = dict(self._received)
        return Receipt(self._received[sender], self._durable.get(sender, 0))


def _ranges(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """[0, 1, 4] -> (0, 2), (4, 5)."""
    first = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[first], numbers[i - 1] + 1
            first = i


def _slice(event: StepsDone, start: int, stop: int) -> StepsDone:
    names = ("losses", "weights", "rows", "learning_rates", "finished", "data_waits", "row_ids")
    lists: dict[str, Any] = {name: getattr(event, name) for name in names}
    parts = {name: values and values[start:stop] for name, values in lists.items()}
    return replace(event, first_step=event.first_step + start, **parts)
