"""Which pieces are read for a worker, in which order, and how is one read?

A unit is the part of a plan's window that the worker needs; reading it yields blocks of rows together with their row
numbers, transformed. Where a unit is read (a thread of the worker, a Ray Data process) is decided in `direct_reader`
and `ray_reader`; both call `read` here, so the rows are the same.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raytrain.data.batch import to_array
from raytrain.data.source import Columns, Source
from raytrain.errors import DataError
from raytrain.plan.order import Plan

Transform = Callable[[Columns], Columns]

MIN_PIECE_ROWS = 256  # rows that are transformed and handed over at once, at least


@dataclass(frozen=True)
class Unit:
    """Positions [begin, end) of the span of a logical worker, inside the plan's window [start, stop)."""

    epoch: int
    logical: int
    start: int
    stop: int
    begin: int
    end: int


@dataclass(frozen=True)
class Block:
    """Rows of one logical worker, in the order of use.

    Args:
        logical: whose they are.
        place: how many rows that logical worker uses before these, counted from the first epoch on.
        rows: their numbers in the source, shape [rows].
        columns: of shape [rows, ...].
    """

    logical: int
    place: int
    rows: NDArray[np.int64]
    columns: Columns


@dataclass(frozen=True)
class Work:
    """All that a reader must know: logical workers `held` over the steps [first_step, last_step)."""

    source: Source
    plan: Plan
    transform: Transform | None
    held: tuple[int, ...]
    first_step: int
    last_step: int

    def full_share(self, logical: int) -> int:
        """Rows of a logical worker in a full step."""
        batch, parts = self.plan.global_batch, self.plan.num_logical
        return batch // parts + (logical < batch % parts)

    def first_place(self, logical: int) -> int:
        """Rows that a logical worker uses before the first step."""
        epoch, in_epoch = divmod(self.first_step, self.plan.steps_per_epoch)
        return epoch * self.plan.epoch(epoch).span_length(logical) + in_epoch * self.full_share(logical)

    @property
    def piece_rows(self) -> int:
        """Rows that are transformed at once: follows from the plan alone, so a transform sees the same pieces always."""
        return max(MIN_PIECE_ROWS, -(-self.plan.global_batch // self.plan.num_logical))


class Reader(Protocol):
    """How the blocks of a worker are made."""

    def parts(self, work: Work) -> Sequence[Callable[[], Iterator[Block]]]:
        """Iterators over blocks that start at once, each in a thread of its own, and are used one after the other.

        Each logical worker's blocks come in the order of use, over all parts.
        """


def units(work: Work, logical: int) -> Iterator[Unit]:
    """The units of a logical worker, over the epochs, in the order of use."""
    plan, share = work.plan, work.full_share(logical)
    epoch, in_epoch = divmod(work.first_step, plan.steps_per_epoch)
    while epoch * plan.steps_per_epoch < work.last_step:
        order = plan.epoch(epoch)
        begin, end = in_epoch * share, (work.last_step - epoch * plan.steps_per_epoch) * share
        for window in order.windows(logical, begin):
            if window.start >= end:
                break
            bounds = max(begin, window.start), min(end, window.stop)
            yield Unit(epoch, logical, window.start, window.stop, *bounds)
        epoch, in_epoch = epoch + 1, 0


def by_first_use(work: Work, streams: Mapping[int, Iterator[Unit]]) -> Iterator[Unit]:
    """The units of all logical workers, in the order in which steps first need them."""

    def first_use(unit: Unit) -> tuple[int, int]:
        return unit.epoch * work.plan.steps_per_epoch + unit.begin // work.full_share(unit.logical), unit.logical

    return heapq.merge(*streams.values(), key=first_use)


def in_order_of_use(work: Work, streams: Mapping[int, Iterator[Unit]]) -> Iterator[Block]:
    """Reads units here and now, and yields their blocks in the order in which steps need them, until all are used."""
    blocks = {logical: itertools.chain.from_iterable(read(work, u) for u in streams[logical]) for logical in streams}
    ahead = dict.fromkeys(blocks, 0)  # rows that were yielded and that no step has used yet
    for step in range(work.first_step, work.last_step):
        for logical in list(blocks):
            while ahead[logical] < work.plan.share(step, logical):
                block = next(blocks[logical], None)
                if block is None:
                    del blocks[logical]
                    break
                ahead[logical] += len(block.rows)
                yield block
            ahead[logical] -= work.plan.share(step, logical)
        if not blocks:
            return


def read(work: Work, unit: Unit) -> Iterator[Block]:
    """Reads a unit: chunked data at once, data in memory piece by piece; transforms and yields it in pieces.

    Pieces are cut from the start of the window, and with a transform they are whole, so what a transform sees does not
    depend on where a unit begins.

    Raises:
        DataError: from the source, or because of what the transform returned.
    """
    cuts = _cuts(work, unit)
    order = work.plan.epoch(unit.epoch)
    rows, epoch_place = order.span_rows(unit.logical, cuts[0], cuts[-1]), unit.epoch * order.span_length(unit.logical)
    window = None if work.source.chunk_rows is None else work.source.take(rows)
    types: dict[str, Any] = {}
    for begin, end in itertools.pairwise(cuts):
        piece = slice(begin - cuts[0], end - cuts[0])
        columns = work.source.take(rows[piece]) if window is None else _slice(window, piece)
        if work.transform is not None:
            columns = _transformed(work.transform, columns, end - begin)
            check_types(types, columns)
        wanted = slice(max(unit.begin - begin, 0), max(unit.end - begin, 0))
        place = epoch_place + max(unit.begin, begin)
        yield Block(unit.logical, place, rows[piece][wanted], _slice(columns, wanted))


def check_types(types: dict[str, Any], columns: Columns) -> None:
    """Refuses columns that are not like those seen before; `types` remembers them, empty at first.

    Raises:
        DataError: a column appeared, vanished, or changed its type or the shape of a row.
    """
    found = {name: (values.dtype, values.shape[1:]) for name, values in columns.items()}
    if found == types:
        return
    if not types:
        types.update(found)
        return
    name = next(name for name in {**types, **found} if types.get(name) != found.get(name))
    before, now = (f"{t[name][0]} {list(t[name][1])}" if name in t else "absent" for t in (types, found))
    rule = f"a column has one type and one shape per row in all batches of a run; before: {before}"
    raise DataError(f"data, column {name!r}", now, rule, "return the same type and shape for all rows from `transform`")


def _cuts(work: Work, unit: Unit) -> list[int]:
    """Where a unit is cut in pieces, its begin and end included; moved outwards to whole pieces for a transform."""
    size, begin, end = work.piece_rows, unit.begin, unit.end
    if work.transform is not None:
        begin -= (begin - unit.start) % size
        end = min(end + (unit.start - end) % size, unit.stop)
    return [begin, *range(begin + size - (begin - unit.start) % size, end, size), end]


def _slice(columns: Columns, part: slice) -> Columns:
    return {name: values[part] for name, values in columns.items()}


def _transformed(transform: Transform, columns: Columns, num_rows: int) -> Columns:
    made = transform(columns)
    if not isinstance(made, Mapping):
        rule = "returns numpy columns by name"
        raise DataError("transform", f"returned {type(made).__name__}", rule, "return the dictionary of columns")
    made = {name: to_array("transform", name, values) for name, values in made.items()}
    for name, values in made.items():
        if len(values) != num_rows:
            rule = f"keeps the number of rows: it was given {num_rows}"
            fix = "return one entry per row; leave rows out where the data are made"
            raise DataError(f"transform, column {name!r}", f"{len(values)} rows", rule, fix)
    return made
