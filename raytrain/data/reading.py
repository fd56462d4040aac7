"""Which rows does a worker read, in which order, and how does the user's transform see them?

A `ReadTask` is the part of a window of the plan that a worker needs. Reading one yields `RawBatch`es; the transform turns
each into a `RowBatch`. Raw batches and their random seeds follow from the plan alone, so the user's code (the transform,
and `__getitem__` of a dataset) sees the same rows and draws the same numbers wherever and whenever it runs: in the training
thread or in a Ray Data process, never in a thread beside the training, which shares the process's random generators.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raytrain.data.prefetch import OnDemand, Prefetcher
from raytrain.data.seeding import SEEDED_GENERATORS, seeded_generators
from raytrain.data.source import NOTHING, ByColumn, Columns, Source, sliced, to_array
from raytrain.errors import DataError
from raytrain.plan import EpochOrder, Plan

Transform = Callable[[Columns], Columns]

READ_THREADS = 4  # of a worker that reads ahead
AHEAD_BYTES = 64 * 2**20  # that they read ahead; larger reads wait until they are needed
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


Read = Callable[[], "list[RawBatch]"]
"""A call of the source, for consecutive rows of a logical worker."""


class Stream(Protocol):
    """Batches, one after the other, of `Prefetcher` or `OnDemand`."""

    def next(self) -> RowBatch | RawBatch | None: ...

    def close(self) -> None: ...


class Reader(Protocol):
    """How the rows of a worker are read."""

    def streams(self, request: ReadRequest) -> Sequence[Stream]:
        """Streams that the caller uses up one after the other; over all, the rows of each logical worker are in order."""


class LocalReader:
    """A `Reader` in the worker: in threads that read ahead, but in the training thread where the user's code runs."""

    def streams(self, request: ReadRequest) -> Sequence[Stream]:
        source = request.source
        in_memory = source.chunk_rows is None and not source.decodes  # one thread is enough, and none take turns
        if source.runs_user_code or in_memory:
            tasks = {logical: read_tasks(request, logical) for logical in request.assigned}
            return [one_stream(request, lambda: read_in_order(request, tasks))]
        return [OnDemand(lambda: _read_ahead(request))]


def one_stream(request: ReadRequest, make: Callable[[], Iterator[RawBatch]]) -> Stream:
    """Reads in a thread, and ahead; in the training thread if the source runs the user's code."""
    return OnDemand(make) if request.source.runs_user_code else Prefetcher(make, prefetch_depth(request))


def prefetch_depth(request: ReadRequest) -> int:
    """Number of batches that wait for the training."""
    return max(2, 2 * len(request.assigned))


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
    return _in_order_of_use(request, {i: chain.from_iterable(read_task(request, task) for task in tasks[i]) for i in tasks})


def read_task(request: ReadRequest, task: ReadTask) -> Iterator[RawBatch]:
    """Reads a task: chunked data at once, in-memory data batch by batch.

    Raises:
        DataError: from the source.
    """
    for read in _reads(request, task):
        yield from read()


def _read_ahead(request: ReadRequest) -> Iterator[RawBatch]:
    """As `read_in_order`, of all tasks; threads call the source for what comes next, for each logical worker."""
    pool = ThreadPool(READ_THREADS)  # its threads are daemons: a read that hangs does not keep the process alive
    try:
        reads = {i: (read for task in read_tasks(request, i) for read in _reads(request, task)) for i in request.assigned}
        yield from _in_order_of_use(request, {i: _through(pool, reads[i], AHEAD_BYTES // len(reads)) for i in reads})
    finally:
        pool.terminate()


def _through(pool: ThreadPool, reads: Iterator[Read], ahead_bytes: int) -> Iterator[RawBatch]:
    """The batches of reads in their order; the pool runs further ones as long as these are of `ahead_bytes` at most."""
    waiting: deque[AsyncResult[list[RawBatch]]] = deque()
    while read := waiting.popleft() if waiting else next((pool.apply_async(read) for read in reads), None):
        batches = read.get()
        num_bytes = sum(values.nbytes for raw in batches for values in raw.batch.columns.values())
        ahead = min(READ_THREADS, ahead_bytes // max(num_bytes, 1))
        waiting.extend(pool.apply_async(read) for read in islice(reads, max(0, ahead - len(waiting))))
        yield from batches


def _in_order_of_use(request: ReadRequest, batches: dict[int, Iterator[RawBatch]]) -> Iterator[RawBatch]:
    """The batches of all logical workers, in the order in which steps need them. Empties `batches`."""
    unused = dict.fromkeys(batches, 0)  # rows that were yielded and that no step has used yet
    for step in range(request.first_step, request.last_step):
        for logical in list(batches):
            while unused[logical] < request.plan.batch_size(step, logical):
                raw = next(batches[logical], None)
                if raw is None:
                    del batches[logical]
                    break
                unused[logical] += raw.num_wanted
                yield raw
            unused[logical] -= request.plan.batch_size(step, logical)
        if not batches:
            return


def _reads(request: ReadRequest, task: ReadTask) -> Iterator[Read]:
    """The calls of the source that read a task: one for chunked data, one for each batch of in-memory data."""
    bounds = _batch_bounds(request, task)
    order = request.plan.epoch(task.epoch)
    parts = map(list, pairwise(bounds)) if request.source.chunk_rows is None else [bounds]
    return (partial(_read, request, task, order, part) for part in parts)


def _read(request: ReadRequest, task: ReadTask, order: EpochOrder, bounds: Sequence[int]) -> list[RawBatch]:
    """Reads the rows between the outermost bounds at once, and cuts them at the others."""
    row_ids = order.span_row_ids(task.logical, bounds[0], bounds[-1])
    seed = (request.plan.seed, task.epoch)
    columns = request.source.take(row_ids, seed)
    offset = task.epoch * order.span_length(task.logical)
    batches = []
    for begin, end in pairwise(bounds):
        part = slice(begin - bounds[0], end - bounds[0])
        batch = RowBatch(task.logical, offset + begin, row_ids[part], sliced(columns, part))
        wanted = slice(max(task.begin - begin, 0), min(task.end, end) - begin)
        batches.append(RawBatch(batch, (*seed, task.logical, begin), wanted))
    return batches


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
    """Positions of the span where batches begin and end.

    A transform sees whole batches, counted from the start of the window, whose number of rows does not depend on workers:
    the outer bounds are moved outwards. Without one, batches end where steps do, so that a step is part of one batch. Rows
    of a dataset may be slow to read, and the training may wait for them: they are read for one step at a time.
    """
    plan, begin, end = request.plan, task.begin, task.end
    if request.transform is not None:
        size = max(MIN_BATCH_ROWS, -(-plan.global_batch // plan.num_logical))
        begin -= (begin - task.start) % size
        end = min(end + (task.start - end) % size, task.stop)
        return [begin, *range(begin + size, end, size), end]
    rows = plan.full_batch_size(task.logical)
    size = rows if request.source.runs_user_code else -(-MIN_BATCH_ROWS // rows) * rows
    return [begin, *range(begin + size - begin % size, end, size), end]


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
