"""Which rows does a worker read, in which order, and how does the user's transform see them?

A `ReadTask` is the part of a window of the plan that a worker needs. Reading one yields `RawBatch`es; the transform turns
each into a `RowBatch`. Raw batches and their random seeds follow from the plan alone, so the user's code (the transform,
and `__getitem__` of a dataset) sees the same rows and draws the same numbers wherever and whenever it runs: in the training
thread or in a Ray Data process, never in a thread beside the training, which shares the process's random generators.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raytrain.data.seeding import SEEDED_GENERATORS, seeded_generators
from raytrain.data.source import NOTHING, ByColumn, Columns, Source, sliced, to_array
from raytrain.errors import DataError
from raytrain.plan import Plan

Transform = Callable[[Columns], Columns]

MIN_BATCH_ROWS = 256  # least number of rows that are transformed and delivered at once


@dataclass(frozen=True)
class ReadTask:
    """Positions [begin, end) of the span of a logical worker, inside the plan's window [start, stop)."""

    epoch: int
    logical: int
    start: int
    stop: int
    begin: int
    end: int


@dataclass(frozen=True)
class RowBatch:
    """Consecutive rows of one logical worker, in order of use, ready for training.

    Args:
        logical: the logical worker.
        offset: number of rows that the logical worker uses before these, from the first epoch on.
        row_ids: ids of the rows in the source, shape [rows].
        columns: of shape [rows, ...].
    """

    logical: int
    offset: int
    row_ids: NDArray[np.int64]
    columns: Columns

    def part(self, rows: slice) -> RowBatch:
        """Some consecutive rows, sharing memory; `rows` has a start."""
        return RowBatch(self.logical, self.offset + rows.start, self.row_ids[rows], sliced(self.columns, rows))


@dataclass(frozen=True)
class RawBatch:
    """Rows that were read and not transformed yet.

    Args:
        batch: the rows, as read.
        seed: what the random numbers of the transform follow from.
        wanted: the rows that the worker uses; the transform sees the others too.
    """

    batch: RowBatch
    seed: tuple[int, ...]
    wanted: slice

    @property
    def num_wanted(self) -> int:
        return int(self.wanted.stop - self.wanted.start)


@dataclass(frozen=True)
class ReadRequest:
    """What to read: the rows of some logical workers in a range of steps.

    Args:
        source: where the rows are.
        plan: which rows each step uses.
        transform: prepares numpy columns, keeping the number of rows; None for none.
        assigned: the logical workers.
        first_step: first global step; steps go on over epochs.
        last_step: the step after the last one.
    """

    source: Source
    plan: Plan
    transform: Transform | None
    assigned: tuple[int, ...]
    first_step: int
    last_step: int

    def first_offset(self, logical: int) -> int:
        """Number of rows that a logical worker uses before the first step."""
        epoch, in_epoch = divmod(self.first_step, self.plan.steps_per_epoch)
        return epoch * self.plan.epoch(epoch).span_length(logical) + in_epoch * self.plan.full_batch_size(logical)

    def first_use(self, task: ReadTask) -> int:
        """The step that first needs rows of a task."""
        return task.epoch * self.plan.steps_per_epoch + task.begin // self.plan.full_batch_size(task.logical)

    @property
    def raw_batch_rows(self) -> int:
        """Number of rows that are transformed at once; does not depend on workers.

        Rows of a dataset may be slow to read, and the training may wait for them: they are read for one step at a time.
        """
        rows = -(-self.plan.global_batch // self.plan.num_logical)
        return rows if self.source.runs_user_code and self.transform is None else max(MIN_BATCH_ROWS, rows)


class Reader(Protocol):
    """How the rows of a worker are read."""

    def streams(self, request: ReadRequest) -> Sequence[Callable[[], Iterator[RowBatch | RawBatch]]]:
        """Iterators that the caller uses up one after the other.

        The first one reads in this process, so it runs in the training thread if the source runs the user's code. All
        others start at once, each in a thread of its own. Over all, the rows of each logical worker come in order of use.
        """


class DirectReader:
    """A `Reader` in the worker: for in-memory data, and where there is no Ray. Starts no processes."""

    def streams(self, request: ReadRequest) -> Sequence[Callable[[], Iterator[RowBatch | RawBatch]]]:
        return [lambda: read_in_order(request, {logical: read_tasks(request, logical) for logical in request.assigned})]


def read_tasks(request: ReadRequest, logical: int) -> Iterator[ReadTask]:
    """The tasks of a logical worker, over all epochs, in order of use."""
    plan, batch_size = request.plan, request.plan.full_batch_size(logical)
    epoch, in_epoch = divmod(request.first_step, plan.steps_per_epoch)
    while epoch * plan.steps_per_epoch < request.last_step:
        order = plan.epoch(epoch)
        begin, end = in_epoch * batch_size, (request.last_step - epoch * plan.steps_per_epoch) * batch_size
        for window in order.windows(logical, begin):
            if window.start >= end:
                break
            bounds = max(begin, window.start), min(end, window.stop)
            yield ReadTask(epoch, logical, window.start, window.stop, *bounds)
        epoch, in_epoch = epoch + 1, 0


def by_first_use(request: ReadRequest, tasks: Mapping[int, Iterator[ReadTask]]) -> Iterator[ReadTask]:
    """The tasks of all logical workers, in the order in which steps first need them."""
    return heapq.merge(*tasks.values(), key=lambda task: (request.first_use(task), task.logical))


def read_in_order(request: ReadRequest, tasks: Mapping[int, Iterator[ReadTask]]) -> Iterator[RawBatch]:
    """Reads the tasks of each logical worker in this thread; yields batches in the order in which steps need them."""
    read = {logical: itertools.chain.from_iterable(read_task(request, t) for t in tasks[logical]) for logical in tasks}
    unused = dict.fromkeys(read, 0)  # rows that were yielded and that no step has used yet
    for step in range(request.first_step, request.last_step):
        for logical in list(read):
            while unused[logical] < request.plan.batch_size(step, logical):
                raw = next(read[logical], None)
                if raw is None:
                    del read[logical]
                    break
                unused[logical] += raw.num_wanted
                yield raw
            unused[logical] -= request.plan.batch_size(step, logical)
        if not read:
            return


def read_task(request: ReadRequest, task: ReadTask) -> Iterator[RawBatch]:
    """Reads a task: chunked data at once, in-memory data batch by batch.

    Batches are counted from the start of the window, and with a transform they are whole, so that what a transform sees
    does not depend on where the task begins.

    Raises:
        DataError: from the source.
    """
    bounds = _batch_bounds(request, task)
    order = request.plan.epoch(task.epoch)
    row_ids = order.span_row_ids(task.logical, bounds[0], bounds[-1])
    epoch_offset = task.epoch * order.span_length(task.logical)
    seed = (request.plan.seed, task.epoch)
    window = None if request.source.chunk_rows is None else request.source.take(row_ids, seed)
    for begin, end in itertools.pairwise(bounds):
        inside = slice(begin - bounds[0], end - bounds[0])
        columns = request.source.take(row_ids[inside], seed) if window is None else sliced(window, inside)
        batch = RowBatch(task.logical, epoch_offset + begin, row_ids[inside], columns)
        wanted = slice(max(task.begin - begin, 0), min(task.end, end) - begin)
        yield RawBatch(batch, (*seed, task.logical, begin), wanted)


def transformed(transform: Transform | None, raw: RawBatch, left_out: Mapping[str, str] = NOTHING) -> RowBatch:
    """Transforms a batch and drops the rows that are not wanted. `left_out` has the columns of the source that are not read.

    The generators of PyTorch, numpy and Python are seeded for the transform, and afterwards as they were before.

    Raises:
        DataError: the transform did not return columns with as many rows.
        Exception: whatever the transform raised.
    """
    batch = raw.batch
    if transform is not None:
        with seeded_generators() as seed:
            seed(*raw.seed)
            columns = _checked(transform(ByColumn(batch.columns, left_out)), len(batch.row_ids))
        batch = RowBatch(batch.logical, batch.offset, batch.row_ids, columns)
    return batch if raw.num_wanted == len(batch.row_ids) else batch.part(raw.wanted)


def first_rows(source: Source, transform: Transform | None, row_ids: NDArray[np.int64]) -> Columns:
    """Some rows as hooks see them, for a warm-up pass; transformed twice, to see whether other workers would get the same.

    Raises:
        DataError: the transform did not return columns with as many rows, or other values the second time.
        Exception: whatever the user's code raised.
    """
    if transform is None:
        return source.take(row_ids)
    whole = slice(0, len(row_ids))
    raws = [RawBatch(RowBatch(0, 0, row_ids, source.take(row_ids)), (0, 0, 0, 0), whole) for _ in range(2)]
    first, again = (transformed(transform, raw, source.left_out).columns for raw in raws)
    for name, values in first.items():
        if name not in again or values.tobytes() != again[name].tobytes():
            fix = "draw from them, or make a generator in `transform`: np.random.default_rng(np.random.randint(2**31))"
            raise DataError(f"transform, column {name!r}", "differs each time for the same rows", SEEDED_GENERATORS, fix)
    return first


def _batch_bounds(request: ReadRequest, task: ReadTask) -> list[int]:
    """Positions where batches begin and end; with a transform the outer ones are moved outwards to whole batches."""
    size, begin, end = request.raw_batch_rows, task.begin, task.end
    if request.transform is not None:
        begin -= (begin - task.start) % size
        end = min(end + (task.start - end) % size, task.stop)
    return [begin, *range(begin + size - (begin - task.start) % size, end, size), end]


def _checked(returned: object, num_rows: int) -> Columns:
    if not isinstance(returned, Mapping):
        rule = "returns numpy columns by name"
        raise DataError("transform", f"returned {type(returned).__name__}", rule, "return the dictionary of columns")
    columns = {name: to_array("transform", name, values) for name, values in returned.items()}
    for name, values in columns.items():
        if len(values) != num_rows:
            rule = f"keeps the number of rows, here {num_rows}"
            fix = "return one entry per row; drop rows where the data are written"
            raise DataError(f"transform, column {name!r}", f"{len(values)} rows", rule, fix)
    return columns
