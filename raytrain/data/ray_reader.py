"""Reads and transforms in Ray Data's processes, on any node, while the worker trains.

The worker's units, in the order of first use, become a small Ray Dataset; each is read by one task, whose blocks come
back in that order. The first windows are read in the worker meanwhile, since Ray Data takes a while to start. Runs in
the worker, but for `_read_unit`, which runs in Ray Data's processes. Ray Data reserves no CPU for it: the workers may
have all of them, and then the data would never come; so the number of tasks is bounded instead.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raytrain.data.carried import Carried, Carrier
from raytrain.data.reading import Block, Unit, Work, by_first_use, in_order_of_use, read, units
from raytrain.data.wire import from_table, to_table

HEAD_ROWS = 1024  # rows of a logical worker that are read in the worker while Ray Data starts, at least
UNITS_PER_DATASET = 512  # bounds the time that Ray Data needs to start; starting the next one takes 0.3 s
BLOCK_BYTES = 16 * 2**20
STORE_BYTES = 512 * 2**20  # Ray Data starts no more tasks while its finished blocks take more of the object store


@dataclass(frozen=True)
class RayReader:
    """Reads with Ray Data. A `Reader`.

    Args:
        num_tasks: units that are read at the same time, for each worker.
    """

    num_tasks: int = 2

    def parts(self, work: Work) -> Sequence[Callable[[], Iterator[Block]]]:
        streams = {logical: units(work, logical) for logical in work.held}
        head = {logical: iter(_head(stream)) for logical, stream in streams.items()}
        rest = by_first_use(work, streams)
        first = next(rest, None)
        parts = [lambda: in_order_of_use(work, head)]
        if first is not None:
            parts.append(lambda: self._blocks(work, itertools.chain([first], rest)))
        return parts

    def _blocks(self, work: Work, rest: Iterator[Unit]) -> Iterator[Block]:
        import ray

        shipped = ray.put(work)  # once; each task gets a reference
        while some := list(itertools.islice(rest, UNITS_PER_DATASET)):
            yield from self._run(shipped, some)

    def _run(self, shipped: Any, some: list[Unit]) -> Iterator[Block]:
        """The blocks of some units, in their order. Closing the iterator stops Ray Data."""
        import ray.data

        _silence_console()
        wanted = ray.data.from_items([dataclasses.asdict(unit) for unit in some], override_num_blocks=len(some))
        _set_up(wanted.context)
        blocks = wanted.map_batches(
            _read_unit,
            batch_size=1,
            batch_format="numpy",
            fn_kwargs={"shipped": shipped},
            num_cpus=0,
            compute=ray.data.TaskPoolStrategy(size=self.num_tasks),
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


def _head(stream: Iterator[Unit]) -> list[Unit]:
    """Takes units from a stream until they have enough rows to bridge the start of Ray Data."""
    taken, rows = [], 0
    while rows < HEAD_ROWS and (unit := next(stream, None)) is not None:
        taken.append(unit)
        rows += unit.end - unit.begin
    return taken


def _read_unit(unit: dict[str, Any], shipped: Any) -> Iterator[Any]:
    """Reads one unit, given as columns of one row, in a process of Ray Data."""
    import ray

    with Carrier():
        work = ray.get(shipped)
        for block in read(work, Unit(**{name: int(value[0]) for name, value in unit.items()})):
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
