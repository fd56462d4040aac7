"""How do Ray Data's processes, on any node, read and transform while the worker trains?

A worker's read tasks, in order of first use, become small Ray Datasets; each Ray task reads a few of them, and the row
batches come back as Arrow tables in that order. The worker reads directly until Ray Data runs, which takes 3 to 10 s the
first time (`ReaderSwitch`). Ray Data reserves no CPU: workers may have all of them, and then the data would never come;
so the number of Ray tasks is bounded instead. Runs in the worker, but for `_read_remotely`; does not import PyTorch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import chain, dropwhile, islice, pairwise, repeat
from types import TracebackType
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raytrain.data.prefetch import Prefetcher
from raytrain.data.reading import (
    LocalReader,
    RawBatch,
    ReadRequest,
    ReadTask,
    RowBatch,
    Stream,
    by_first_use,
    one_stream,
    prefetch_depth,
    read_in_order,
    read_task,
    read_tasks,
    transformed,
)
from raytrain.data.source import Source, check_types
from raytrain.errors import RaytrainError, TaskError, task_traceback

FEW_ROWS = 1024  # of a logical worker; not worth the start of Ray Data
TASK_ROWS = 8192  # smaller read tasks share a Ray task, since a Ray task costs the worker 20 ms
FIRST_TASKS = 16  # Ray tasks of the first dataset; Ray Data starts it in 0.15 s
TASKS_PER_DATASET = 128  # Ray tasks of the others; Ray Data starts one in 0.45 s
TASKS_LEFT = 4  # the next dataset starts when the latest one has so many left: its processes are free by then
BLOCK_BYTES = 16 * 2**20
STORE_BYTES = 512 * 2**20  # Ray Data starts no more tasks while its finished blocks take more of the object store

LEAD_S = 2.0  # Ray Data, once it runs, delivers after 0.2 s, or 1.5 s where others use the processors too
MIN_ELAPSED_S = 0.1
LEAD_ROWS = 1024  # least lead of a logical worker, in case the training has only just begun

_LOGICAL, _OFFSET, _ROW_IDS = "logical", "offset", "row_ids"  # Arrow columns; those of the data have names in JSON: "[..."


@dataclass(frozen=True)
class Shipped:
    """References to a source and to the rest of a request, which become a `ReadRequest` in Ray Data's processes."""

    source: Any
    rest: Any

    def fetch(self) -> ReadRequest:
        request: ReadRequest = _fetch(self.rest)(source=_fetch(self.source))
        return request


@dataclass(frozen=True)
class RayReader:
    """Reads with Ray Data. A `Reader`.

    Args:
        num_tasks: Ray tasks that read at the same time, for each worker.
    """

    num_tasks: int = 2

    def streams(self, request: ReadRequest) -> Sequence[Stream]:
        if (request.last_step - request.first_step) * request.plan.global_batch <= FEW_ROWS * request.plan.num_logical:
            return LocalReader().streams(request)
        switch = ReaderSwitch(request)
        later = Prefetcher(lambda: self._read_with_ray(request, switch), prefetch_depth(request))
        return [one_stream(request, switch.read_directly), later]

    def _read_with_ray(self, request: ReadRequest, switch: ReaderSwitch) -> Iterator[RowBatch]:
        """What Ray Data reads, from the step on that is agreed on once it runs."""
        import ray

        try:
            shipped = Shipped(_put_once(request.source), ray.put(_without_source(request)))
            for _ in self._run(shipped, [[] for _ in range(self.num_tasks)]):  # starts processes, with all their imports
                pass
        finally:  # an error must not let direct reading go on to the end
            rest = switch.agree()
        tasks = _grouped(rest, max_rows=min(TASK_ROWS, BLOCK_BYTES / max(switch.row_bytes, 1)))
        yield from _dataset_after_dataset(partial(self._run, shipped), tasks)

    def _run(self, shipped: Shipped, tasks: list[list[ReadTask]]) -> Iterator[RowBatch]:
        """The batches of one dataset, a Ray task for each list, in order. Closing the iterator stops Ray Data."""
        import ray.data

        _silence_console()
        items = [{"tasks": pickle.dumps(task)} for task in tasks]
        dataset = ray.data.from_items(items, override_num_blocks=len(items))
        _configure(dataset.context)
        blocks = dataset.map_batches(
            _read_remotely,
            batch_size=1,
            batch_format="numpy",
            fn_kwargs={"shipped": shipped},
            num_cpus=0,
            compute=ray.data.TaskPoolStrategy(size=min(self.num_tasks, len(items))),
        )
        tables = iter(blocks.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1))
        try:
            for table in tables:
                yield from from_table(table)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RemoteError):
                error.cause.reraise()
            raise
        finally:
            tables.close()


class ReaderSwitch:
    """Divides the read tasks of a worker between a thread that reads directly and Ray Data; reads each once.

    Direct reading goes on until Ray Data has proved that it runs. Then a step a little ahead is agreed on: direct
    reading goes up to it, at its pace so far, while Ray Data reads what comes after. Shared by the two threads that read.

    Args:
        request: what to read.
        clock: seconds that pass.
    """

    def __init__(self, request: ReadRequest, clock: Callable[[], float] = time.monotonic) -> None:
        self._request, self._clock = request, clock
        self._lock = threading.Lock()
        self._began_s = clock()
        self._rows = self._bytes = 0  # that were read directly
        self._latest = request.first_step  # first use of the latest task that was given to direct reading
        self._step: int | None = None  # tasks of this step and later ones are Ray Data's

    def read_directly(self) -> Iterator[RawBatch]:
        """Reads in this thread until Ray Data takes over, in order of use."""
        request = self._request
        for raw in read_in_order(request, {logical: self._until_ray(logical) for logical in request.assigned}):
            self._rows += raw.num_wanted
            self._bytes += sum(values[raw.wanted].nbytes for values in raw.batch.columns.values())
            yield raw

    def agree(self) -> Iterator[ReadTask]:
        """Agrees on the step; returns Ray Data's tasks, in order of first use."""
        request = replace(self._request, plan=replace(self._request.plan))  # a plan caches epochs, for one thread at a time
        batch_size = request.plan.global_batch / request.plan.num_logical
        rows = self._rows / len(request.assigned)  # of each logical worker
        lead = max(LEAD_ROWS, rows * LEAD_S / max(self._clock() - self._began_s, MIN_ELAPSED_S))
        with self._lock:
            step = self._step = max(self._latest, request.first_step + int((rows + lead) / batch_size)) + 1
        tasks = {logical: read_tasks(request, logical) for logical in request.assigned}
        return by_first_use(
            request, {logical: dropwhile(lambda task: request.first_use(task) < step, tasks[logical]) for logical in tasks}
        )

    @property
    def row_bytes(self) -> float:
        """Mean size of the rows that were read directly."""
        return self._bytes / max(self._rows, 1)

    def _until_ray(self, logical: int) -> Iterator[ReadTask]:
        for task in read_tasks(self._request, logical):
            first_use = self._request.first_use(task)
            with self._lock:
                if self._step is not None and first_use >= self._step:
                    return
                self._latest = max(self._latest, first_use)
            yield task


class RemoteError(RaytrainError):
    """An exception on its way from a Ray Data process to the worker.

    It travels pickled inside of this one, since Ray Data changes the arguments of exceptions that pass through it, after
    which some of them cannot be unpickled.

    Args:
        pickled: the exception, or b"" where it cannot be pickled.
        text: its traceback.
        added: what Ray Data adds; ignored.
    """

    def __init__(self, pickled: bytes, text: str, *added: object) -> None:
        super().__init__(pickled, text, *added)
        self.pickled, self.text = pickled, text

    def __str__(self) -> str:
        return self.text

    def reraise(self) -> NoReturn:
        """Raises the original exception, caused by this one; TaskError with its traceback if it cannot be pickled."""
        if self.pickled:
            raise pickle.loads(self.pickled) from self
        raise TaskError(self.text, "reading the data or `transform`")


class RemoteErrors:
    """A context manager that raises each exception as `RemoteError`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, Exception):
            raise RemoteError(_pickled(error), task_traceback(error)) from error


def ray_is_running() -> bool:
    """Whether this process is connected to Ray; does not import it."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def to_table(batch: RowBatch) -> pa.Table:
    """Encodes a batch as an Arrow table that Ray Data may join and cut without a change of dtype or shape.

    Each column becomes one of fixed-size binary values, one per row, whose name holds name, dtype and row shape. Shares
    memory with the arrays.
    """
    num_rows = len(batch.row_ids)
    logical = np.full(num_rows, batch.logical, dtype=np.int64)
    offset = np.arange(batch.offset, batch.offset + num_rows, dtype=np.int64)
    arrays = {_LOGICAL: pa.array(logical), _OFFSET: pa.array(offset), _ROW_IDS: pa.array(batch.row_ids)}
    for name, values in batch.columns.items():
        width = values.dtype.itemsize * math.prod(values.shape[1:])
        data = pa.py_buffer(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        column = pa.Array.from_buffers(pa.binary(width), num_rows, [None, data])
        arrays[json.dumps([name, values.dtype.str, values.shape[1:]])] = column
    return pa.table(arrays)


def from_table(table: pa.Table) -> Iterator[RowBatch]:
    """Decodes the batches of a table; several if Ray Data joined them. Their arrays are read-only."""
    for chunk in table.to_batches():
        logical, offset = chunk.column(_LOGICAL).to_numpy(), chunk.column(_OFFSET).to_numpy()
        cuts = [0, *(np.flatnonzero((np.diff(logical) != 0) | (np.diff(offset) != 1)) + 1).tolist(), len(logical)]
        for start, stop in pairwise(cuts if len(logical) else []):
            yield _decoded(chunk.slice(start, stop - start))


def _decoded(chunk: pa.RecordBatch) -> RowBatch:
    columns = {}
    for key, column in zip(chunk.schema.names, chunk.columns, strict=True):
        if key not in (_LOGICAL, _OFFSET, _ROW_IDS):
            name, dtype, shape = json.loads(key)
            columns[name] = _to_numpy(column, np.dtype(dtype), shape)
    logical, offset = chunk.column(_LOGICAL)[0].as_py(), chunk.column(_OFFSET)[0].as_py()
    return RowBatch(logical, offset, chunk.column(_ROW_IDS).to_numpy(), columns)


def _to_numpy(column: pa.Array, dtype: np.dtype[Any], shape: list[int]) -> NDArray[Any]:
    width = dtype.itemsize * math.prod(shape)
    if not width:
        return np.empty((len(column), *shape), dtype)
    data = np.frombuffer(column.buffers()[1], dtype=np.uint8)
    start = column.offset * width
    return data[start : start + len(column) * width].view(dtype).reshape(len(column), *shape)


def _grouped(tasks: Iterator[ReadTask], max_rows: float) -> Iterator[list[ReadTask]]:
    """Consecutive read tasks for each Ray task: as many as have at most `max_rows` rows, at least one."""
    group: list[ReadTask] = []
    rows = 0
    for task in tasks:
        if group and rows + task.end - task.begin > max_rows:
            yield group
            group, rows = [], 0
        group.append(task)
        rows += task.end - task.begin
    if group:
        yield group


def _dataset_after_dataset(
    run: Callable[[list[list[ReadTask]]], Iterator[RowBatch]], tasks: Iterator[list[ReadTask]]
) -> Iterator[RowBatch]:
    """The batches of dataset after dataset; the next one starts before the latest one ends."""
    sizes = chain([FIRST_TASKS], repeat(TASKS_PER_DATASET))

    def start() -> tuple[Prefetcher[RowBatch], int] | None:
        some = list(islice(tasks, next(sizes)))
        early = sum(task.end - task.begin for group in some[:-TASKS_LEFT] for task in group)
        return (Prefetcher(partial(run, some), depth=2), early) if some else None

    latest, following = start(), None
    try:
        while latest is not None:
            batches, early = latest
            while (batch := batches.next()) is not None:
                early -= len(batch.row_ids)
                if early <= 0 and following is None:
                    following = start()
                yield batch
            latest, following = following or start(), None
    finally:
        for one in (latest, following):
            if one is not None:
                one[0].close()


def _put_once(source: Source) -> Any:
    """A reference to a source; the data are copied to Ray's object store once in a process, not in each generation."""
    import ray

    if source not in _put:
        _put[source] = ray.put(source)
    return _put[source]


_put: WeakKeyDictionary[Source, Any] = WeakKeyDictionary()


def _without_source(request: ReadRequest) -> Callable[..., ReadRequest]:
    """Makes the request once it is given the source."""
    return partial(ReadRequest, **{f.name: getattr(request, f.name) for f in fields(request) if f.name != "source"})


@lru_cache(maxsize=4)
def _fetch(reference: Any) -> Any:
    """What a reference refers to; not unpickled, and no order of an epoch drawn, again for each Ray task."""
    import ray

    return ray.get(reference)


def _read_remotely(item: dict[str, Any], shipped: Shipped) -> Iterator[Any]:
    """Reads the tasks of an item, given as columns of one row, in a process of Ray Data."""
    with RemoteErrors():
        request = shipped.fetch()
        types: dict[str, Any] = {}
        for task in pickle.loads(item["tasks"][0]):
            for raw in read_task(request, task):
                batch = transformed(request.transform, raw, request.source.left_out)
                check_types(types, batch.columns)
                yield to_table(batch)


def _configure(context: Any) -> None:
    """Sets what our dataset needs in its own context; that of the process is the user's, and other threads use it."""
    from ray.data import ExecutionResources

    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ExecutionResources(object_store_memory=STORE_BYTES)
    context.target_max_block_size = BLOCK_BYTES
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.raise_original_map_exception = True


def _silence_console() -> None:
    """Sends Ray Data's messages to its log file only: what it would print here reaches the user as our own errors."""
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.CRITICAL + 1)


def _pickled(error: Exception) -> bytes:
    from ray import cloudpickle  # pickles classes of the user's script by value

    with contextlib.suppress(Exception):  # the user's exception may fail in any way here; its text is carried anyway
        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)
        return data
    return b""
