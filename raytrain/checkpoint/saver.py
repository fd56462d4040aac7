"""How are checkpoints saved while training continues? By one background thread of rank 0's process.

The training thread submits a snapshot; the background thread serializes it, writes it, emits the event, and applies
retention. A storage failure becomes an event and `last_error`, never an exception in the training thread.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from raytrain.checkpoint.manifest import to_delete
from raytrain.checkpoint.state import Snapshot
from raytrain.checkpoint.store import CheckpointStore
from raytrain.errors import CheckpointError, StorageError, UnsavableError
from raytrain.events.kinds import CheckpointFailed, CheckpointSaved, Event
from raytrain.rundir import NoAnswer


class Saver:
    """Saves snapshots in the background, one at a time.

    Args:
        store: the checkpoint store.
        keep_newest, keep_best, best: as in `to_delete`.
        emit: receives the events; called from both threads.
        before_write: called in the background thread before a snapshot is written, for what must happen before the
            checkpoint exists.
        max_stall_s: maximum time that `save` waits for the previous snapshot before it drops the new one.
    """

    def __init__(
        self,
        store: CheckpointStore,
        keep_newest: int,
        keep_best: int,
        best: str,
        emit: Callable[[Event], None],
        *,
        before_write: Callable[[], None] = lambda: None,
        max_stall_s: float = 600.0,
    ) -> None:
        self._store, self._emit, self._max_stall_s = store, emit, max_stall_s
        self._before_write = before_write
        self._keep_newest, self._keep_best, self._best = keep_newest, keep_best, best
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[None] | None = None
        self.newest_step: int | None = None
        """Finished steps of the newest submitted snapshot; None before the first."""
        self.last_error: BaseException | None = None
        """Error of the latest save; None if it succeeded."""
        self._evaluated_step: int | None = None
        self._told: tuple[str, int] = "", 0
        """The latest reason of a failure, without numbers, and how often in a row."""

    @property
    def can_retry(self) -> bool:
        """Whether the latest save failed, and another attempt may succeed: the storage was at fault, and did answer."""
        error = self.last_error
        if not isinstance(error, CheckpointError | StorageError | OSError) or isinstance(error, UnsavableError):
            return False
        return not isinstance(error.__cause__, NoAnswer)

    @property
    def idle(self) -> bool:
        """Whether no snapshot is being written."""
        return self._in_flight is None or self._in_flight.done()

    def save(self, snapshot: Snapshot, metrics: Mapping[str, float], run: Mapping[str, Any]) -> None:
        """Submits a snapshot. Blocks only while the previous one is still being written.

        Args:
            snapshot: the state to save; its memory is released once it is written.
            metrics: evaluation metrics of these weights, by name; may be empty.
            run: plain values of the run, for the manifest.
        """
        start, self.newest_step = time.monotonic(), snapshot.step
        self._evaluated_step = snapshot.step if metrics else None
        if not self.wait(self._max_stall_s):
            waited_s = time.monotonic() - start
            self._failed(
                snapshot.step, CheckpointError(f"the previous checkpoint is still being written after {waited_s:.0f} s")
            )
            return
        stall_s = snapshot.seconds + time.monotonic() - start
        writing = self._thread.submit(self._write, snapshot, dict(metrics), dict(run), stall_s)
        # A second task: the future of the first one holds any exception, expected or not.
        self._in_flight = self._thread.submit(self._finish, snapshot, writing)

    def set_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics to the checkpoint of `step`, after the snapshots that were submitted before; never blocks."""
        if step != self._evaluated_step:
            self._evaluated_step = step
            self._in_flight = self._thread.submit(self._set_metrics, step, dict(metrics))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until no snapshot is being written; returns False on timeout. None waits without a limit."""
        if self._in_flight is not None:
            wait([self._in_flight], timeout_s)
        return self.idle

    def close(self, timeout_s: float | None = None) -> bool:
        """Waits as `wait` and ends the thread; `save` must not be called afterwards."""
        done = self.wait(timeout_s)
        self._thread.shutdown(wait=done)
        return done

    def _write(self, snapshot: Snapshot, metrics: dict[str, float], run: dict[str, Any], stall_s: float) -> None:
        start = time.monotonic()
        self._before_write()
        checkpoint = self._store.write(snapshot.step, snapshot.files(), metrics, run)
        self._emit(
            CheckpointSaved(
                step=snapshot.step,
                checkpoint=checkpoint.name,
                size_bytes=checkpoint.manifest.size_bytes,
                seconds=time.monotonic() - start,
                stall_s=stall_s,
            )
        )
        self._retain(snapshot.step, checkpoint.name)

    def _retain(self, step: int, just_written: str) -> None:
        """Applies retention, and deletes the remains of killed or failed saves.

        Emits an event on failure; the checkpoint that was just written stays valid.
        """
        try:
            found = self._store.list()
            pinned = self._store.pinned()
            for old in to_delete(found, self._keep_newest, self._keep_best, self._best, just_written, pinned):
                self._store.delete(old)
            self._store.delete_incomplete()
        except (CheckpointError, StorageError) as error:
            self._emit(
                CheckpointFailed(
                    step=step, reason=f"{just_written} is saved, but old checkpoints could not be deleted: {error}"
                )
            )

    def _set_metrics(self, step: int, metrics: dict[str, float]) -> None:
        try:
            self._store.set_metrics(step, metrics)
        except (CheckpointError, StorageError) as error:
            self._emit(CheckpointFailed(step=step, reason=f"it is saved without its metrics: {error}"))
        else:
            self._retain(step, "")

    def _finish(self, snapshot: Snapshot, writing: Future[None]) -> None:
        snapshot.release()
        self.last_error = writing.exception()
        if self.last_error:
            self._failed(snapshot.step, self.last_error)
        else:
            self._told = "", 0

    def _failed(self, step: int, error: BaseException) -> None:
        """Emits an event; of failures in a row that differ in numbers only the first, second, fourth, eighth and so on."""
        self.last_error = error
        reason = str(error) or type(error).__name__
        kind = re.sub(r"\d+", "", reason)
        count = self._told[1] + 1 if self._told[0] == kind else 1
        self._told = kind, count
        if count & (count - 1) == 0:
            self._emit(CheckpointFailed(step=step, reason=reason if count == 1 else f"{reason} ({count} times)"))
