"""Reads and transforms in Ray Data's processes, on any node, while the worker trains.

The worker's units, in the order of first use, become small Ray Datasets; a task reads a few units, and the blocks come
back in that order. The worker reads directly until Ray Data runs, which takes 3 to 10 s for the first time. Runs in the
worker, but for `_read_units`, which runs in Ray Data's processes. Ray Data reserves no CPU for it: the workers may have
all of them, and then the data would never come; so the number of tasks is bounded instead.
"""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

from raytrain.data.ahead import Ahead
from raytrain.data.carried import Carried, Carrier
from raytrain.data.columns import check_types
from raytrain.data.direct_reader import DirectReader
from raytrain.data.handover import Handover
from raytrain.data.reading import Block, Piece, Unit, Work, pieces
from raytrain.data.transforming import transformed
from raytrain.data.wire import from_table, to_table

FEW_ROWS = 1024  # so few of a logical worker are not worth the start of Ray Data
TASK_ROWS = 8192  # units that are smaller are read together by a task, since a task costs the worker 20 ms
FIRST_TASKS = 16  # of the first dataset; Ray Data starts it in 0.15 s
TASKS_PER_DATASET = 128  # of the others, which it starts in 0.45 s
TASKS_LEFT = 4  # the next dataset starts when the latest one has so many left: its processes are free by then
BLOCK_BYTES = 16 * 2**20
STORE_BYTES = 512 * 2**20  # Ray Data starts no more tasks while its finished blocks take more of the object store


@dataclass(frozen=True)
class RayReader:
    """Reads with Ray Data. A `Reader`.

    Args:
        num_tasks: tasks that read at the same time, for each worker.
    """

    num_tasks: int = 2

    def parts(self, work: Work) -> Sequence[Callable[[], Iterator[Block | Piece]]]:
        if (work.last_step - work.first_step) * work.plan.global_batch <= FEW_ROWS * work.plan.num_logical:
            return DirectReader().parts(work)
        handover = Handover(work)
        return [handover.pieces, lambda: self._blocks(work, handover)]

    def _blocks(self, work: Work, handover: Handover) -> Iterator[Block]:
        """What Ray Data reads, from the step on that is agreed on once it runs."""
        import ray

        try:
            shipped = ray.put(work)  # once; each task gets a reference
            for _ in self._run(shipped, [[] for _ in range(self.num_tasks)]):  # starts processes, with all their imports
                pass
        finally:  # an error must not let direct reading go on to the end
            rest = handover.agree()
        tasks = _tasks(rest, max_rows=min(TASK_ROWS, BLOCK_BYTES / max(handover.row_bytes, 1)))
        yield from _in_turn(partial(self._run, shipped), tasks)

    def _run(self, shipped: Any, tasks: list[list[Unit]]) -> Iterator[Block]:
        """The blocks of some units, in their order. Closing the iterator stops Ray Data."""
        import ray.data

        _silence_console()
        items = [{"units": pickle.dumps(task)} for task in tasks]
        wanted = ray.data.from_items(items, override_num_blocks=len(items))
        _set_up(wanted.context)
        blocks = wanted.map_batches(
            _read_units,
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
            if isinstance(error.cause, Carried):
                error.cause.deliver()
            raise
        finally:
            tables.close()


def ray_is_running() -> bool:
    """Whether this process is connected to Ray; does not import it."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _tasks(units: Iterator[Unit], max_rows: float) -> Iterator[list[Unit]]:
    """Consecutive units, as many as have no more rows than a task should have; at least one."""
    task: list[Unit] = []
    rows = 0
    for unit in units:
        if task and rows + unit.end - unit.begin > max_rows:
            yield task
            task, rows = [], 0
        task.append(unit)
        rows += unit.end - unit.begin
    if task:
        yield task


def _in_turn(run: Callable[[list[list[Unit]]], Iterator[Block]], tasks: Iterator[list[Unit]]) -> Iterator[Block]:
    """The blocks of dataset after dataset; the next one starts before the latest one ends."""

    sizes = chain([FIRST_TASKS], repeat(TASKS_PER_DATASET))

    def start() -> tuple[Ahead[Block], int] | None:
        some = list(islice(tasks, next(sizes)))
        early = sum(unit.end - unit.begin for task in some[:-TASKS_LEFT] for unit in task)
        return (Ahead(partial(run, some), depth=2), early) if some else None

    latest, following = start(), None
    try:
        while latest is not None:
            blocks, early = latest
            while (block := blocks.next()) is not None:
                early -= len(block.rows)
                if early <= 0 and following is None:
                    following = start()
                yield block
            latest, following = following or start(), None
    finally:
        for one in (latest, following):
            if one is not None:
                one[0].close()


def _read_units(task: dict[str, Any], shipped: Any) -> Iterator[Any]:
    """Reads the units of a task, given as columns of one row, in a process of Ray Data."""
    import ray

    with Carrier():
        work = ray.get(shipped)
        types: dict[str, Any] = {}
        for unit in pickle.loads(task["units"][0]):
            for piece in pieces(work, unit):
                block = transformed(work.transform, piece)
                check_types(types, block.columns)
                yield to_table(block)


def _set_up(context: Any) -> None:
    """Sets what our dataset needs in its own context; the one of the process is the user's, and other threads use it."""
    from ray.data import ExecutionResources

    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ExecutionResources(object_store_memory=STORE_BYTES)
    context.target_max_block_size = BLOCK_BYTES
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.raise_original_map_exception = True


def _silence_console() -> None:
    """Ray Data's messages go to its log file only: what it would tell here reaches the user as our own errors."""
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.CRITICAL + 1)
