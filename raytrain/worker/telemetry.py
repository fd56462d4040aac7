"""What a worker tells the outside, in batches, from a thread of its own: training never waits for it.

Every rank keeps the records of the last steps, since a leader may die before it has told them; the next leader tells them
again, and the event log drops what it has already. Newcomers learn from the leader what may not have been told yet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from raytrain.events.curve import StepRecord
from raytrain.events.kinds import Event, StepsDone

SEND_EVERY_S = 0.5
PATIENCE_S = 10.0
"""How long a delivery may take; while deliveries fail, whoever wants to wait for one waits for a tenth of it."""
KEEP_S = 60.0
MAX_UNSENT = 20_000
"""How many events wait while deliveries fail; older ones are given up."""

log = logging.getLogger(__name__)


Send = Callable[[list[Event], float], None]
"""Delivers events: returns when they are in the run's log, and raises if that takes longer than so many seconds."""


class Telemetry:
    """Collects events and step records, and delivers them through `send`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._delivery = threading.Lock()  # one delivery at a time, so that none overtakes another
        self._events: list[Event] = []
        self._records: deque[StepRecord] = deque()
        self._sent_below = self._told_below = 0
        self._leads = False
        self._is_failing = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        now = event if event.time else replace(event, time=time.time())
        with self._lock:
            self._queue_records()
            self._events.append(now)

    def record(self, record: StepRecord) -> None:
        with self._lock:
            self._records.append(record)
            while record.finished - self._records[0].finished > KEEP_S and self._may_forget(self._records[0]):
                self._records.popleft()

    def untold(self) -> list[StepRecord]:
        """The records that may not be in the run's log yet, as far as this rank, which led until now, knows."""
        with self._lock:
            return [record for record in self._records if record.step >= self._told_below]

    def learn(self, records: list[StepRecord]) -> None:
        """Remembers steps in which this rank had no part, so that it can tell them if it becomes the leader."""
        with self._lock:
            known = {record.step for record in self._records}
            more = [record for record in records if record.step not in known]
            self._records = deque(sorted([*self._records, *more], key=lambda record: record.step))

    def lead(self, leads: bool) -> None:
        """Whether this rank tells the steps; a new leader tells all that it still remembers."""
        with self._lock:
            if leads and not self._leads:
                self._sent_below = self._told_below = 0
            self._leads = leads

    def flush(self) -> None:
        """Sends what is there, in the order in which it happened; what cannot be delivered is kept and sent again."""
        if not self._delivery.acquire(timeout=PATIENCE_S / 10 if self._is_failing else PATIENCE_S):
            return
        try:
            with self._lock:
                self._queue_records()
                events, self._events = self._events, []
                sent_below = self._sent_below
            is_told = not events or self._deliver(events)
            with self._lock:
                if not is_told:
                    self._events = [*events, *self._events][-MAX_UNSENT:]
                elif self._sent_below >= sent_below:  # else it has become the leader meanwhile, and tells all again
                    self._told_below = sent_below
        finally:
            self._delivery.release()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5)
        self.flush()

    def _queue_records(self) -> None:
        """Puts the steps that were not told yet behind the events so far."""
        fresh = [r for r in self._records if r.step >= self._sent_below] if self._leads else []
        if fresh:
            self._sent_below = fresh[-1].step + 1
            self._events.extend(map(_as_event, _stretches(fresh)))

    def _may_forget(self, record: StepRecord) -> bool:
        return not self._leads or record.step < self._told_below

    def _run(self) -> None:
        while not self._closed.wait(SEND_EVERY_S):
            self.flush()

    def _deliver(self, events: list[Event]) -> bool:
        limit_s = PATIENCE_S / 10 if self._is_failing else PATIENCE_S
        try:
            self._send(events, limit_s)
        except Exception as error:  # noqa: BLE001 - the one guard around telemetry: its failure must not end a run
            if not self._is_failing:
                log.warning("could not deliver %d events (%s); they are sent again", len(events), type(error).__name__)
            self._is_failing = True
            return False
        self._is_failing = False
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
        data_waits=[r.data_wait_s for r in records],
        row_ids=[r.row_ids or "" for r in records] if with_rows else None,
    )
