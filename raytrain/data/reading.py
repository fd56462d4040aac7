"""Which pieces are read for a worker, in which order, and how is one read?

A unit is the part of a plan's window that the worker needs; reading it yields pieces of rows with their row numbers. A
piece becomes a block of rows for the training in `transforming`. Where that is done (in the worker, in a Ray Data
process) is decided in `direct_reader` and `ray_reader`; both come here, so the rows are the same.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raytrain.data.columns import sliced
from raytrain.data.source import Columns, Source
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

    def part(self, rows: slice) -> Block:
        """Some consecutive rows, sharing memory; `rows` has a start."""
        return Block(self.logical, self.place + rows.start, self.rows[rows], sliced(self.columns, rows))


@dataclass(frozen=True)
class Piece:
    """Rows as they were read, to be transformed together.

    Args:
        block: the rows.
        seed: what the random numbers of a transform of them follow from.
        wanted: those that the worker uses; the others are there for the transform only.
    """

    block: Block
    seed: tuple[int, ...]
    wanted: slice

    @property
    def num_wanted(self) -> int:
        return int(self.wanted.stop - self.wanted.start)


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

    def first_use(self, unit: Unit) -> int:
        """The step that first needs a unit."""
        return unit.epoch * self.plan.steps_per_epoch + unit.begin // self.full_share(unit.logical)

    @property
    def piece_rows(self) -> int:
        """Rows that are transformed at once: follows from the plan alone, so a transform sees the same pieces always."""
        return max(MIN_PIECE_ROWS, -(-self.plan.global_batch // self.plan.num_logical))


class Reader(Protocol):
    """How the rows of a worker are read."""

    def parts(self, work: Work) -> Sequence[Callable[[], Iterator[Block | Piece]]]:
        """Iterators that start at once, each in a thread of its own, and are used one after the other.

        Each logical worker's rows come in the order of use, over all parts. Pieces are still to be transformed, in the
        training thread: the random generators that a transform uses belong to the process.
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
    return heapq.merge(*streams.values(), key=lambda unit: (work.first_use(unit), unit.logical))


def in_order_of_use(work: Work, streams: Mapping[int, Iterator[Unit]]) -> Iterator[Piece]:
    """Reads units here and now, and yields their pieces in the order in which steps need them, until all are used."""
    read = {logical: itertools.chain.from_iterable(pieces(work, u) for u in streams[logical]) for logical in streams}
    ahead = dict.fromkeys(read, 0)  # rows that were yielded and that no step has used yet
    for step in range(work.first_step, work.last_step):
        for logical in list(read):
            while ahead[logical] < work.plan.share(step, logical):
                piece = next(read[logical], None)
                if piece is None:
                    del read[logical]
                    break
                ahead[logical] += piece.num_wanted
                yield piece
            ahead[logical] -= work.plan.share(step, logical)
        if not read:
            return


def pieces(work: Work, unit: Unit) -> Iterator[Piece]:
    """Reads a unit: chunked data at once, data in memory piece by piece.

    Pieces are cut from the start of the window, and with a transform they are whole, so what a transform sees does not
    depend on where a unit begins.

    Raises:
        DataError: from the source.
    """
    cuts = _cuts(work, unit)
    order = work.plan.epoch(unit.epoch)
    rows, epoch_place = order.span_rows(unit.logical, cuts[0], cuts[-1]), unit.epoch * order.span_length(unit.logical)
    window = None if work.source.chunk_rows is None else work.source.take(rows)
    for begin, end in itertools.pairwise(cuts):
        inside = slice(begin - cuts[0], end - cuts[0])
        columns = work.source.take(rows[inside]) if window is None else sliced(window, inside)
        block = Block(unit.logical, epoch_place + begin, rows[inside], columns)
        wanted = slice(max(unit.begin - begin, 0), min(unit.end, end) - begin)
        yield Piece(block, (work.plan.seed, unit.epoch, unit.logical, begin), wanted)


def _cuts(work: Work, unit: Unit) -> list[int]:
    """Where a unit is cut in pieces, its begin and end included; moved outwards to whole pieces for a transform."""
    size, begin, end = work.piece_rows, unit.begin, unit.end
    if work.transform is not None:
        begin -= (begin - unit.start) % size
        end = min(end + (unit.start - end) % size, unit.stop)
    return [begin, *range(begin + size - (begin - unit.start) % size, end, size), end]
