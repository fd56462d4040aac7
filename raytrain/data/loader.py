"""What does a worker train on in step s? Its micro-batches as tensors, ready when they are wanted.

Cuts the batches that a reader delivers into the micro-batches of the plan's steps, and transforms those that were read
directly. Chooses no rows: row ids come with the data, from where they were read. Moves nothing to a device. Runs in the
worker; `step` is called by the training thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raytrain.data.ray_reader import RayReader, ray_is_running
from raytrain.data.reading import LocalReader, RawBatch, Reader, ReadRequest, RowBatch, Transform, transformed
from raytrain.data.source import NOTHING, ByColumn, Columns, Source, check_types
from raytrain.errors import InternalError


class Batch(ByColumn[torch.Tensor]):
    """Tensors by column name, each of shape [rows, ...]; what the task's hooks get."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], left_out: Mapping[str, str] = NOTHING) -> None:
        super().__init__(tensors, left_out)


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward and backward pass.

    Args:
        columns: tensors of shape [rows, ...].
        row_ids: ids of the rows in the source, shape [rows], int64.
    """

    columns: Batch
    row_ids: NDArray[np.int64]


class Loader:
    """The micro-batches of the logical workers that are assigned to a worker.

    Args:
        request: which rows to load.
        micro_batch: greatest number of rows of a micro-batch; None for all rows of a logical worker in a step.
        reader: reads the rows; see `choose_reader`.
    """

    def __init__(self, request: ReadRequest, micro_batch: int | None, reader: Reader) -> None:
        self._request, self._micro_batch, self._next_step = request, micro_batch, request.first_step
        self._latest: dict[int, list[list[RowBatch]]] = {}
        self._waiting: dict[int, deque[RowBatch]] = {logical: deque() for logical in request.assigned}
        self._offsets = {logical: request.first_offset(logical) for logical in request.assigned}  # of the next batch
        self._types: dict[str, Any] = {}
        self._lends = request.transform is None and not request.source.runs_user_code
        own = replace(request, plan=replace(request.plan))  # a plan caches epochs, for one thread at a time
        self._streams = deque(reader.streams(own))
        self._batches = self._delivered()

    def step(self, step: int) -> dict[int, list[MicroBatch]]:
        """The micro-batches of each assigned logical worker, in order; empty if it has no rows in this step.

        Steps are asked for one after the other; the latest one may be asked for again and is the same.

        Raises:
            DataError: the data cannot be read, or the transform did not return columns with as many rows.
            Exception: whatever the user's transform or dataset raised.
        """
        if step == self._next_step and step < self._request.last_step:
            self._latest = {logical: self._micro_batches(step, logical) for logical in self._waiting}
            self._next_step += 1
        elif step != self._next_step - 1 or not self._latest:
            raise InternalError(f"step {step} was asked of a loader that is at step {self._next_step}")
        elif self._lends:
            self._latest = {
                i: [[self._read_again(part) for part in parts] for parts in self._latest[i]] for i in self._latest
            }
        left_out = self._request.source.left_out
        return {i: [_to_micro_batch(parts, left_out, self._lends) for parts in each] for i, each in self._latest.items()}

    def close(self) -> None:
        """Stops reading; returns at once. Idempotent."""
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        for batches in self._waiting.values():
            batches.clear()

    def _read_again(self, batch: RowBatch) -> RowBatch:
        """The rows as they were before a hook wrote to them."""
        plan = self._request.plan
        seed = plan.seed, (self._next_step - 1) // plan.steps_per_epoch
        return replace(batch, columns=self._request.source.take(batch.row_ids, seed))

    def _micro_batches(self, step: int, logical: int) -> list[list[RowBatch]]:
        """Takes the rows of a logical worker in a step: for each micro-batch, the parts of it."""
        left = self._request.plan.batch_size(step, logical)
        size = self._micro_batch or left
        return [self._take(logical, min(size, left - start)) for start in range(0, left, size or 1)]

    def _take(self, logical: int, num_rows: int) -> list[RowBatch]:
        waiting, parts = self._waiting[logical], []
        while num_rows:
            while not waiting:
                self._pull()
            batch = waiting.popleft()
            if num_rows < len(batch.row_ids):
                waiting.appendleft(batch.part(slice(num_rows, None)))
                batch = batch.part(slice(0, num_rows))
            parts.append(batch)
            num_rows -= len(batch.row_ids)
        return parts

    def _pull(self) -> None:
        """Moves one batch from the readers to those that wait."""
        batch = next(self._batches, None)
        if batch is None:
            raise InternalError(f"the loader has no rows left for step {self._next_step}, is closed, or has failed")
        if batch.offset != self._offsets[batch.logical]:
            raise InternalError(f"logical worker {batch.logical} got rows out of order: {batch.offset}")
        self._offsets[batch.logical] += len(batch.row_ids)
        check_types(self._types, batch.columns)
        self._waiting[batch.logical].append(batch)

    def _transformed(self, raw: RawBatch) -> RowBatch:
        return transformed(self._request.transform, raw, self._request.source.left_out)

    def _delivered(self) -> Iterator[RowBatch]:
        """What the reader delivers. Ends with the first error, so that no rows are skipped after it."""
        while self._streams:
            item = self._streams[0].next()
            if item is None:
                self._streams.popleft()
            else:
                yield item if isinstance(item, RowBatch) else self._transformed(item)


def choose_reader(how: str, source: Source, transform: Transform | None) -> Reader:
    """The reader that `run.reader` asks for; without Ray, that of the worker."""
    return RayReader() if _reads_with_ray(how, source, transform)[0] and ray_is_running() else LocalReader()


def describe_reader(how: str, source: Source, transform: Transform | None) -> str:
    """What reads the rows of a source in a run, and why."""
    is_ray, reason = _reads_with_ray(how, source, transform)
    return ("Ray Data, since " if is_ray else "threads of the workers, since ") + reason


def _reads_with_ray(how: str, source: Source, transform: Transform | None) -> tuple[bool, str]:
    """Whether `run.reader` means Ray Data for a source, and why.

    "auto" means it where rows are computed, since other processes and nodes can do that while the worker trains. Rows that
    are only read or copied reach the training sooner from threads of the worker.
    """
    if how != "auto":
        return how == "ray", f"run.reader is {how}"
    if transform is not None:
        return True, "`transform` computes them"
    if source.runs_user_code:
        return True, "__getitem__ computes them"
    return source.decodes, "they are decoded" if source.decodes else "they are ready to use"


def to_tensors(columns: Columns, left_out: Mapping[str, str] = NOTHING) -> Batch:
    """Numpy columns as tensors that share their memory; read-only arrays are copied, since hooks may write to a batch.

    Args:
        left_out: for each column of the source that is not read, the reason.
    """
    writable = {name: values if values.flags.writeable else values.copy() for name, values in columns.items()}
    return Batch({name: torch.from_numpy(values) for name, values in writable.items()}, left_out)


def _to_micro_batch(parts: list[RowBatch], left_out: Mapping[str, str], lends: bool) -> MicroBatch:
    """The rows as tensors. A hook may write to its batch, and the step may have to be redone.

    Args:
        lends: whether the arrays themselves are given away, since the rows can be read again. Else they are copied: what a
            transform or a dataset returns may be the user's own.
    """
    if len(parts) == 1:
        columns = parts[0].columns if lends else {name: values.copy() for name, values in parts[0].columns.items()}
        return MicroBatch(to_tensors(columns, left_out), parts[0].row_ids)
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    return MicroBatch(to_tensors(columns, left_out), np.concatenate([part.row_ids for part in parts]))
