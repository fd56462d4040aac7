"""What does a worker train on in step s? Its micro-batches, step after step, ready when they are wanted.

Joins what a reader delivers to the shares of the plan's steps; transforms what was read directly. It chooses no rows:
row numbers come with the data, from where they were read. Runs in the worker; `step` is called by the training thread
only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raytrain.data.ahead import Ahead
from raytrain.data.batch import MicroBatch, rows_to_tensors, to_tensors
from raytrain.data.columns import check_types
from raytrain.data.direct_reader import DirectReader
from raytrain.data.ray_reader import RayReader, ray_is_running
from raytrain.data.reading import Block, Reader, Transform, Work
from raytrain.data.source import Source
from raytrain.data.transforming import transformed
from raytrain.errors import InternalError
from raytrain.plan.order import Plan

Cut = tuple[Block, slice]  # some of its rows


class Feed:
    """The micro-batches of the logical workers that a worker holds.

    Args:
        source: where rows are read.
        plan: which rows each step uses.
        transform: prepares numpy columns, keeping the number of rows; None for none.
        held: logical workers of this worker.
        first_step: first global step that is wanted; steps go on over epochs.
        last_step: the step after the last one.
        micro_batch: most rows of a micro-batch; None for the whole share of a logical worker.
        reader: reads blocks; see `choose_reader`.
    """

    def __init__(
        self,
        source: Source,
        plan: Plan,
        transform: Transform | None,
        held: Sequence[int],
        *,
        first_step: int,
        last_step: int,
        micro_batch: int | None,
        reader: Reader,
    ) -> None:
        own_plan = replace(plan)  # a plan remembers epochs, for one thread at a time
        work = Work(source, own_plan, transform, tuple(held), first_step, last_step)
        self._plan, self._transform, self._held, self._micro_batch = plan, transform, work.held, micro_batch
        self._next_step, self._last_step = first_step, last_step
        self._shares: dict[int, list[list[Cut]]] = {}
        self._waiting: dict[int, deque[Block]] = {logical: deque() for logical in held}
        self._used = dict.fromkeys(held, 0)  # rows of the first waiting block that are used
        self._places = {logical: work.first_place(logical) for logical in held}  # of the next block
        self._types: dict[str, Any] = {}
        depth = max(2, 2 * len(work.held))
        self._parts = deque(Ahead(make, depth) for make in reader.parts(work))
        self._blocks = self._as_blocks()

    def step(self, step: int) -> dict[int, list[MicroBatch]]:
        """The micro-batches of each held logical worker, in order; none where its share of the step has no rows.

        Steps are asked for one after the other; the latest one may be asked for again and is the same.

        Raises:
            DataError: the data cannot be read, or a transform returned something else than columns of as many rows.
            Exception: whatever the user's transform raised.
        """
        if step == self._next_step and step < self._last_step:
            self._shares = {logical: self._draw(step, logical) for logical in self._held}
            self._next_step += 1
        elif step != self._next_step - 1 or not self._shares:
            raise InternalError(f"step {step} was asked of a feed that is at step {self._next_step}")
        return {logical: [_micro_batch(cuts) for cuts in share] for logical, share in self._shares.items()}

    def close(self) -> None:
        """Stops reading; returns at once. May be called twice."""
        for part in self._parts:
            part.close()
        self._parts.clear()
        for blocks in self._waiting.values():
            blocks.clear()

    def _draw(self, step: int, logical: int) -> list[list[Cut]]:
        """Takes the share of a logical worker from the blocks that wait: for each micro-batch, its rows."""
        left = self._plan.share(step, logical)
        size = self._micro_batch or left
        share = []
        while left:
            rows = min(size, left)
            share.append(self._take(logical, rows))
            left -= rows
        return share

    def _take(self, logical: int, num_rows: int) -> list[Cut]:
        waiting, cuts = self._waiting[logical], []
        while num_rows:
            while not waiting:
                self._pull()
            block, start = waiting[0], self._used[logical]
            stop = min(start + num_rows, len(block.rows))
            cuts.append((block, slice(start, stop)))
            num_rows -= stop - start
            self._used[logical] = stop
            if stop == len(block.rows):
                waiting.popleft()
                self._used[logical] = 0
        return cuts

    def _pull(self) -> None:
        """Moves one block from the readers to the blocks that wait."""
        block = next(self._blocks, None)
        if block is None:
            raise InternalError(f"the feed has no rows left for step {self._next_step}, is closed, or has failed")
        if block.place != self._places[block.logical]:
            raise InternalError(f"logical worker {block.logical} got rows out of order: {block.place}")
        self._places[block.logical] += len(block.rows)
        check_types(self._types, block.columns)
        self._waiting[block.logical].append(block)

    def _as_blocks(self) -> Iterator[Block]:
        """What the readers deliver. Ends with the first error, so that no rows are left out after it."""
        while self._parts:
            item = self._parts[0].next()
            if item is None:
                self._parts.popleft()
            else:
                yield item if isinstance(item, Block) else transformed(self._transform, item)


def choose_reader(source: Source, transform: Transform | None) -> Reader:
    """Reads data in memory without a transform directly, all else with Ray Data where Ray is running."""
    if (source.chunk_rows is None and transform is None) or not ray_is_running():
        return DirectReader()
    return RayReader()


def _micro_batch(cuts: list[Cut]) -> MicroBatch:
    """Copies the rows: a hook may write into its batch, and the step may have to be redone."""
    if len(cuts) == 1:
        block, rows = cuts[0]
        return MicroBatch(rows_to_tensors(block.columns, rows), block.rows[rows])
    parts = [block.part(rows) for block, rows in cuts]
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    return MicroBatch(to_tensors(columns), np.concatenate([part.rows for part in parts]))
