"""What a worker reports: step records, events, output of the user's code, and how long training paused.

Reports are delivered in batches by a thread of their own: training never waits for them. Events are kept until they are on
the storage, and sent again if the log, or its process, has lost them. Every rank keeps the records of recent steps, since a
leader may die before they are; the next leader sends them again, and the log drops those that it has. Newcomers receive from
the leader what is not on the storage yet.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from raytrain.events.curve import StepRecord
from raytrain.events.kinds import Event, OutputLine, StepsDone
from raytrain.events.log import Batch, Receipt

SEND_EVERY_S = 0.5
SEND_TIMEOUT_S = 10.0
"""Timeout of a delivery; a tenth of it after a delivery has failed."""
KEEP_S = 60.0
"""How long a rank keeps the record of a step."""
MAX_KEPT = 20_000
"""Events that are kept while deliveries fail; older ones are dropped."""

log = logging.getLogger(__name__)


Send = Callable[[Batch, bool, float], Receipt]
"""Delivers a batch, durably if that is true; raises if that takes longer than the given seconds."""


class Telemetry:
    """Collects events and step records, and delivers them through `send`."""

    def __init__(self, send: Send) -> None:
        self._send, self._sender = send, secrets.token_hex(6)
        self._lock = threading.Lock()
        self._delivery = threading.Lock()  # one delivery at a time, so that none overtakes another
        self._events: deque[Event] = deque()
        """Those that are not known to be on the storage, in the order in which they happened."""
        self._oldest = self._next = 0
        """Numbers of the first of these events, and of the next one to send."""
        self._records: deque[StepRecord] = deque()
        self._queued_below = self._acknowledged_below = 0
        """Records of steps below these are among the events, and are on the storage."""
        self._dropped_from: int | None = None
        """The first step whose event was dropped since there were too many: its record is still there."""
        self._is_leader = False
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
            while record.finished - self._records[0].finished > KEEP_S and self._may_drop(self._records[0]):
                self._records.popleft()

    def unacknowledged(self) -> list[StepRecord]:
        """The records that may not be on the storage yet, as far as this rank, the leader, knows."""
        with self._lock:
            return [record for record in self._records if record.step >= self._acknowledged_below]

    def merge(self, records: list[StepRecord]) -> None:
        """Adds records of steps in which this rank took no part, so that it can send them if it becomes the leader."""
        with self._lock:
            known = {record.step for record in self._records}
            more = [record for record in records if record.step not in known]
            self._records = deque(sorted([*self._records, *more], key=lambda record: record.step))

    def set_leader(self, is_leader: bool) -> None:
        """Only the leader sends step records; a new leader sends all that it still has."""
        with self._lock:
            if is_leader and not self._is_leader:
                self._queued_below = self._acknowledged_below = 0
            self._is_leader = is_leader

    def flush(self, durably: bool = False) -> None:
        """Delivers what is queued, in the order in which it happened; what does not reach the storage is kept.

        Args:
            durably: asks the log to write it at once.
        """
        if not self._delivery.acquire(timeout=self._timeout_s):
            return
        try:
            while self._deliver(durably):
                pass
        finally:
            self._delivery.release()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5)
        self.flush(durably=True)

    def _queue_records(self) -> None:
        """Puts the steps that are new behind the events so far."""
        fresh = [r for r in self._records if r.step >= self._queued_below] if self._is_leader else []
        if fresh:
            self._queued_below = fresh[-1].step + 1
            self._events.extend(map(_as_event, _consecutive(fresh)))
        while len(self._events) > MAX_KEPT:
            dropped = self._drop_oldest()
            if isinstance(dropped, StepsDone):
                first = dropped.first_step
                self._dropped_from = first if self._dropped_from is None else min(first, self._dropped_from)
        self._next = max(self._next, self._oldest)

    def _take(self, receipt: Receipt) -> None:
        """Drops the events that are on the storage, and goes on with the first that the log does not have."""
        while self._events and self._oldest < receipt.durable:
            event = self._drop_oldest()
            if isinstance(event, StepsDone):
                self._acknowledged_below = max(self._acknowledged_below, event.first_step + len(event.losses))
        self._next = max(receipt.received, self._oldest)
        if self._dropped_from is not None:
            self._queued_below = self._acknowledged_below = self._dropped_from
            self._dropped_from = None

    def _drop_oldest(self) -> Event:
        self._oldest += 1
        return self._events.popleft()

    def _may_drop(self, record: StepRecord) -> bool:
        return not self._is_leader or record.step < self._acknowledged_below

    @property
    def _timeout_s(self) -> float:
        return SEND_TIMEOUT_S / 10 if self._is_failing else SEND_TIMEOUT_S

    def _run(self) -> None:
        while not self._closed.wait(SEND_EVERY_S):
            self.flush()

    def _deliver(self, durably: bool) -> bool:
        """Sends what is unsent; returns whether earlier events must be sent first, which a restarted log has lost."""
        with self._lock:
            self._queue_records()
            unsent = list(self._events)[self._next - self._oldest :]
            batch = Batch(self._sender, self._next, self._oldest, unsent)
            if not self._events:
                return False
        try:
            receipt = self._send(batch, durably, self._timeout_s)
        except (RayError, OSError) as error:  # the log is down, or slow: that must not end a run
            if not self._is_failing:
                log.warning("could not deliver %d events (%s); they are sent again", len(unsent), type(error).__name__)
            self._is_failing = True
            return False
        self._is_failing = False
        with self._lock:
            self._take(receipt)
        return receipt.received < batch.first


def _consecutive(records: list[StepRecord]) -> list[list[StepRecord]]:
    """Groups consecutive steps: a worker that was out of the group for a while lacks the steps in between."""
    groups: list[list[StepRecord]] = []
    for record in records:
        if not groups or record.step != groups[-1][-1].step + 1:
            groups.append([])
        groups[-1].append(record)
    return groups


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


class PauseTimer:
    """Measures for how long training stood still between two generations, and why; each worker measures, the leader reports.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._committed = clock()
        self._step_s = 0.0
        self._failed: float | None = None

    def commit_step(self) -> None:
        now = self._clock()
        self._step_s, self._committed, self._failed = now - self._committed, now, None

    def fail_step(self) -> None:
        """The step in flight is lost."""
        self._failed = self._failed or self._clock()

    def parts(self, waited_s: float) -> dict[str, float]:
        """The pause that ends now, as fields of `GenerationFormed`, in seconds.

        Args:
            waited_s: spent at the rendezvous with too few workers.
        """
        pause_s = self._clock() - self._committed
        in_flight_s = (self._failed or self._committed) - self._committed
        redone_s = min(in_flight_s, self._step_s)
        return {
            "pause_s": pause_s,
            "redone_s": redone_s,
            "detecting_s": in_flight_s - redone_s,
            "waiting_s": min(waited_s, pause_s - in_flight_s),
        }


class CapturedStream(io.TextIOBase):
    """A text stream that emits each whole line as an event, from any thread.

    Args:
        stream: "stdout" or "stderr".
        rank: returns the current rank, which changes with the generation.
        emit: receives the events.
    """

    def __init__(self, stream: str, rank: Callable[[], int], emit: Callable[[Event], None]) -> None:
        self._stream, self._rank, self._emit = stream, rank, emit
        self._lock = threading.Lock()
        self._parts: dict[int, str] = {}
        """The unfinished line of each thread, by the thread's id."""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            *lines, part = (self._parts.pop(threading.get_ident(), "") + text).split("\n")
            if part:
                self._parts[threading.get_ident()] = part
        for line in lines:
            self._emit_line(line)
        return len(text)

    def finish(self) -> None:
        """Emits last lines that have no newline."""
        with self._lock:
            parts, self._parts = self._parts, {}
        for part in parts.values():
            self._emit_line(part)

    def _emit_line(self, line: str) -> None:
        """Emits only the last state of a line that was overwritten after carriage returns, as progress bars do."""
        self._emit(OutputLine(rank=self._rank(), stream=self._stream, text=line.rstrip("\r").rpartition("\r")[2]))


@contextlib.contextmanager
def captured_output(rank: Callable[[], int], emit: Callable[[Event], None]) -> Iterator[None]:
    """Emits what the block writes to `sys.stdout` and `sys.stderr` as events."""
    out, err = CapturedStream("stdout", rank, emit), CapturedStream("stderr", rank, emit)
    builtins.print, replaced = plain_print, builtins.print
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            builtins.print = replaced
            out.finish()
            err.finish()


def plain_print(
    *objects: Any, sep: str | None = None, end: str | None = None, file: Any = None, flush: bool = False
) -> None:
    """Python's own `print`, which Ray Train replaces in workers by one that also writes each line to its log."""
    stream = sys.stdout if file is None else file
    stream.write((" " if sep is None else sep).join(map(str, objects)) + ("\n" if end is None else end))
    if flush:
        stream.flush()
