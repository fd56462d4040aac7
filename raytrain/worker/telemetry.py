"""What a worker tells the outside, in batches, from a thread of its own: training never waits for it.

Every rank keeps the records of the last steps, since a leader may die before it has told them; the next leader tells them
again, and the event log drops what it has already.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from raytrain.events.curve import StepRecord
from raytrain.events.kinds import Event, StepsDone

SEND_EVERY_S = 0.5
KEEP_S = 60.0
MAX_UNSENT = 20_000
"""How many events wait while deliveries fail; older ones are given up."""

log = logging.getLogger(__name__)


Send = Callable[[list[Event], bool], None]
"""Delivers events, and may fail; told to wait, it returns when they are in the run's log."""


class Telemetry:
    """Collects events and step records, and delivers them through `send`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._delivery = threading.Lock()  # one delivery at a time, so that none overtakes another
        self._events: list[Event] = []
        self._records: deque[StepRecord] = deque()
        self._sent_below = 0
        self._leads = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        with self._lock:
            self._queue_records()
            self._events.append(event)

    def record(self, record: StepRecord) -> None:
        with self._lock:
            self._records.append(record)
            while record.finished - self._records[0].finished > KEEP_S and self._may_forget(self._records[0]):
                self._records.popleft()

    def lead(self, leads: bool) -> None:
        """Whether this rank tells the steps; a new leader tells all that it still remembers."""
        with self._lock:
            if leads and not self._leads:
                self._sent_below = 0
            self._leads = leads

    def flush(self, wait: bool = False) -> None:
        """Sends what is there, in the order in which it happened; with `wait`, until it is in the run's log."""
        with self._delivery:
            with self._lock:
                self._queue_records()
                events, self._events = self._events, []
            if (events or wait) and not self._deliver(events, wait):
                with self._lock:
                    self._events = [*events, *self._events][-MAX_UNSENT:]

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5)
        self.flush(wait=True)

    def _queue_records(self) -> None:
        """Puts the steps that were not told yet behind the events so far."""
        fresh = [r for r in self._records if r.step >= self._sent_below] if self._leads else []
        if fresh:
            self._sent_below = fresh[-1].step + 1
            self._events.extend(map(_as_event, _stretches(fresh)))

    def _may_forget(self, record: StepRecord) -> bool:
        return not self._leads or record.step < self._sent_below

    def _run(self) -> None:
        while not self._closed.wait(SEND_EVERY_S):
            self.flush()

    def _deliver(self, events: list[Event], wait: bool) -> bool:
        try:
            self._send(events, wait)
        except Exception:  # the one guard around telemetry: its failure must not end a run
            log.warning("could not deliver %d events; they are sent again", len(events), exc_info=True)
            return False
        return True


def _stretches(records: list[StepRecord]) -> list[list[StepRecord]]:
    """Consecutive steps together: a worker that was out of the group for a while lacks the steps in between."""
    stretches: list[list[StepRecord]] = []
    for record in records:
        if not stretches or record.step != stretches[-1][-1].step + 1:
            stretches.append([])
        stretches[-1].append(record)
    return stretches


def _as_event(records: list[StepRecord]) -> StepsDone:
    with_rows = records[0].row_ids is not None
    return StepsDone(
        first_step=records[0].step,
        losses=[r.loss for r in records],
        weights=[r.weight for r in records],
        rows=[r.rows for r in records],
        learning_rates=[r.learning_rate for r in records],
        finished=[r.finished for r in records],
        row_ids=[r.row_ids or "" for r in records] if with_rows else None,
    )
