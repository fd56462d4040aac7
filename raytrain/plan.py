"""Which rows does logical worker l train on in step s, and which rank runs logical worker l?

Pure functions of the dataset's shape, the seed and the batch settings: no state to save, no I/O, integers only. Row ids
count through the source, file after file, row after row.

The rows of an epoch form a line: the chunks in shuffled order, the rows of a chunk in source order. The line is cut into
one span per logical worker, and inside a span rows are shuffled in windows of a few chunks, so that a reader keeps only
one window in memory. In-memory datasets (no chunks) are shuffled as a whole; the order of a large one is never drawn, but
found row by row, so that neither an epoch nor a new generation begins with a pause.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

RowIds = NDArray[np.int64]

CACHED_EPOCHS = 4
IN_MEMORY_WINDOW_ROWS = 8192  # rows of a window of an in-memory dataset
MAX_DRAWN_ROWS = 2**16  # of an in-memory dataset whose order is drawn, in 6 ms; 30 million rows would take 6 s
FEISTEL_ROUNDS = 8


def permutation(length: int, *key: int) -> RowIds:
    """A permutation of range(length) that depends on `key` alone, on no version of numpy.

    Sorts counter-based random keys (Philox-4x64-10; Salmon et al., SC'11), since `Generator.permutation` may
    change between numpy versions while the raw bits of a bit generator may not (NEP 19).
    """
    bits = np.random.Philox(key=_hashed(key, 2))
    return np.argsort(bits.random_raw(length), kind="stable").astype(np.int64, copy=False)


def uniform(length: int, *key: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) that depend on `key` alone, on no version of numpy."""
    return (np.random.Philox(key=_hashed(key, 2)).random_raw(length) >> np.uint64(11)) / 2.0**53


def permuted(positions: RowIds, length: int, *key: int) -> RowIds:
    """The elements at some positions of a permutation of range(length) that depends on `key` alone; draws nothing else.

    A Feistel network over pairs (left, right) with modular addition, which walks on where it leaves the range (Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 5).
    """
    keys = _hashed(key, FEISTEL_ROUNDS)
    num_left = math.isqrt(length - 1) + 1
    num_right = -(-length // num_left)  # num_left * num_right is at least `length`, and less than num_left larger

    def network(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(numbers, np.uint64(num_right))
        for i in range(0, FEISTEL_ROUNDS, 2):
            left = (left + _mixed(right + keys[i]) % np.uint64(num_left)) % np.uint64(num_left)
            right = (right + _mixed(left + keys[i + 1]) % np.uint64(num_right)) % np.uint64(num_right)
        return left * np.uint64(num_right) + right

    found = network(positions.astype(np.uint64))
    while len(outside := np.flatnonzero(found >= length)):
        found[outside] = network(found[outside])
    return found.astype(np.int64)


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Well-mixed bits of each number: the finalizer of SplitMix64 (Steele et al., OOPSLA'14)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _hashed(key: tuple[int, ...], count: int) -> NDArray[np.uint64]:
    """Some 64-bit numbers that follow from a key."""
    digest = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=8 * count).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


@dataclass(frozen=True)
class Window:
    """Consecutive positions of a span whose rows are read and shuffled together."""

    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """The rows of each step of each epoch.

    Args:
        num_rows: number of rows of the source.
        chunk_rows: number of rows of each chunk, in source order, adding up to `num_rows`; None for in-memory datasets.
        global_batch: rows per step.
        num_logical: number of logical workers; each gets an equal part of each step.
        seed: seed of all permutations.
        shuffle: False keeps source order (evaluation).
        shuffle_window: chunks that are shuffled together.
        drop_last: drop a last step with fewer rows than the global batch.
    """

    num_rows: int
    chunk_rows: tuple[int, ...] | None
    global_batch: int
    num_logical: int
    seed: int = 0
    shuffle: bool = True
    shuffle_window: int = 4
    drop_last: bool = False

    @cached_property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.num_rows, self.global_batch)
        return whole + bool(rest and not self.drop_last)

    @property
    def num_dropped_rows(self) -> int:
        """Number of rows that no step of an epoch uses because of `drop_last`."""
        return self.num_rows - min(self.num_rows, self.steps_per_epoch * self.global_batch)

    def rows_in_step(self, step: int) -> int:
        """Number of rows of a global step over all logical workers: the global batch, or the remainder in the last step."""
        in_epoch = step % self.steps_per_epoch
        return min(self.global_batch, self.num_rows - in_epoch * self.global_batch)

    def batch_size(self, step: int, logical: int) -> int:
        """Number of rows of a logical worker in a global step."""
        return _part_of(self.rows_in_step(step), self.num_logical, logical)

    def full_batch_size(self, logical: int) -> int:
        """Number of rows of a logical worker in a step with the whole global batch."""
        return _part_of(self.global_batch, self.num_logical, logical)

    def row_ids(self, step: int, logical: int) -> RowIds:
        """The rows of a logical worker in a global step, in order of use. Shape [batch_size(step, logical)]."""
        epoch, in_epoch = divmod(step, self.steps_per_epoch)
        start = in_epoch * self.full_batch_size(logical)
        return self.epoch(epoch).span_row_ids(logical, start, start + self.batch_size(step, logical))

    def epoch(self, epoch: int) -> EpochOrder:
        """The order of an epoch; the last few are cached, for one thread at a time."""
        orders = self._orders
        if epoch not in orders:
            orders[epoch] = EpochOrder(self, epoch)
            while len(orders) > CACHED_EPOCHS:
                del orders[next(iter(orders))]
        return orders[epoch]

    @cached_property
    def _orders(self) -> dict[int, EpochOrder]:
        return {}

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class EpochOrder:
    """The line of one epoch's rows and its spans."""

    def __init__(self, plan: Plan, epoch: int) -> None:
        self._plan, self._epoch = plan, epoch
        self._drawn: RowIds | None = None
        if plan.chunk_rows is not None:
            count = len(plan.chunk_rows)
            order = permutation(count, plan.seed, epoch) if plan.shuffle else np.arange(count)
            sizes = np.asarray(plan.chunk_rows, dtype=np.int64)
            self._first_row = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)[order]
            self._ends = np.cumsum(sizes[order])
        elif plan.shuffle and plan.num_rows <= MAX_DRAWN_ROWS:
            self._drawn = permutation(plan.num_rows, plan.seed, epoch)
        used = min(plan.num_rows, plan.steps_per_epoch * plan.global_batch)
        whole, rest = divmod(used, plan.global_batch)
        logical = range(plan.num_logical)
        lengths = [whole * plan.full_batch_size(i) + _part_of(rest, plan.num_logical, i) for i in logical]
        self._span_ends = np.cumsum(lengths)
        self._span_starts = self._span_ends - lengths

    def span_length(self, logical: int) -> int:
        """Number of rows of a logical worker in this epoch."""
        return int(self._span_ends[logical] - self._span_starts[logical])

    def windows(self, logical: int, start: int = 0) -> Iterator[Window]:
        """The windows of a span that end after position `start`, in order of use."""
        while start < self.span_length(logical):
            window = self._window_at(logical, start)
            yield window
            start = window.stop

    def span_row_ids(self, logical: int, start: int, stop: int) -> RowIds:
        """Row ids at positions [start, stop) of a span, in order of use. Shape [stop - start]."""
        parts = []
        for window in self.windows(logical, start):
            if window.start >= stop:
                break
            inside = slice(max(start, window.start) - window.start, min(stop, window.stop) - window.start)
            parts.append(self._window_row_ids(logical, window, inside))
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def rows_on_line(self, line: RowIds) -> RowIds:
        """Row ids at positions of the line: chunks in shuffled order, the rows of a chunk in source order."""
        if self._plan.chunk_rows is None:
            return self._in_memory(line)
        chunk = np.searchsorted(self._ends, line, side="right")
        offset = line - np.where(chunk > 0, self._ends[chunk - 1], 0)
        return _int64(self._first_row[chunk] + offset)

    def _window_at(self, logical: int, position: int) -> Window:
        """The window that contains a position of the span: O(log chunks)."""
        length, size = self.span_length(logical), self._plan.shuffle_window
        if self._plan.chunk_rows is None:
            start = position - position % IN_MEMORY_WINDOW_ROWS
            return Window(start, min(start + IN_MEMORY_WINDOW_ROWS, length))
        span_start = int(self._span_starts[logical])
        first_chunk = int(np.searchsorted(self._ends, span_start, side="right"))
        chunk = int(np.searchsorted(self._ends, span_start + position, side="right"))
        first = chunk - (chunk - first_chunk) % size
        last = min(first + size, len(self._ends)) - 1
        start = int(self._ends[first - 1]) if first > first_chunk else span_start
        return Window(start - span_start, min(int(self._ends[last]) - span_start, length))

    def _window_row_ids(self, logical: int, window: Window, inside: slice) -> RowIds:
        positions = np.arange(window.start, window.stop, dtype=np.int64)
        if self._plan.chunk_rows is not None and self._plan.shuffle:
            positions = positions[permutation(len(positions), self._plan.seed, self._epoch, logical, window.start)]
        return self.rows_on_line(positions[inside] + self._span_starts[logical])

    def _in_memory(self, line: RowIds) -> RowIds:
        """Row ids at positions of the line of an in-memory dataset."""
        if not self._plan.shuffle:
            return line
        if self._drawn is not None:
            return self._drawn[line]
        return permuted(line, self._plan.num_rows, self._plan.seed, self._epoch)


def logical_workers_of(rank: int, num_ranks: int, num_logical: int) -> range:
    """The logical workers that a rank runs: consecutive, as equal in number as possible.

    Each rank has at least one, since there are never more ranks than logical workers.
    """
    return range(-(-rank * num_logical // num_ranks), -(-(rank + 1) * num_logical // num_ranks))


def _part_of(rows: int, parts: int, part: int) -> int:
    """Number of rows of a part when `rows` are divided into `parts` as equally as possible; the first parts get one more."""
    return rows // parts + (part < rows % parts)


def _int64(values: NDArray[np.int64]) -> RowIds:
    return values.astype(np.int64, copy=False)
