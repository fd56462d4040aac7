"""Which rows does an epoch take from other sources: some of each, or some rows more often than others?

A drawn source has rows of its own, numbered, of which each is used once in an epoch as everywhere; which row of another
source one of them stands for follows from the run's seed, the epoch and its number alone. So each step has the same rows for
any number of workers. Both keep neighbours together, since row groups are read as a whole. Built in the driver, read in
workers or in Ray Data's processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raytrain.data.arrow import Kinds
from raytrain.data.given import as_source
from raytrain.data.source import Columns, Seed, Source, empty_columns, missing_column
from raytrain.errors import DataError
from raytrain.plan import Plan, RowIds, uniform

MIN_PATTERN_ROWS, MAX_PATTERN_ROWS = 2**12, 2**16
"""Rows after which the sequence of a mix's sources repeats: weights are exact to 0.02 %."""
MIN_STRATUM_ROWS = 256
"""Draws from row groups that are drawn from together: rounding to whole draws changes a row's share by 0.2 % at most."""
WEIGHTS_AT_ONCE = 2**16  # rows that are read at once for their weights
DRAWS = 0x64726177
"""Last of the numbers that draws follow from, so that the order of row groups does not follow from the same ones."""


class MixedSource:
    """Rows of several sources in fixed proportions; see `mix`.

    Args:
        counts: rows of each source in a pattern.
        kinds: of the columns.
    """

    def __init__(self, sources: Sequence[Source], counts: NDArray[np.int64], num_rows: int, kinds: Kinds) -> None:
        self._sources, self._counts, self.num_rows, self._kinds = tuple(sources), counts, num_rows, kinds
        self.runs_user_code = any(source.runs_user_code for source in sources)
        self.decodes = any(source.decodes for source in sources)
        self.columns = tuple(sources[0].columns)
        self.left_out = {name: why for source in reversed(sources) for name, why in source.left_out.items()}
        pattern = interleaved(counts)
        self._source_of = pattern
        self._before = np.stack([np.cumsum(pattern == i) - (pattern == i) for i in range(len(sources))])

    def __reduce__(self) -> Any:
        return MixedSource, (self._sources, self._counts, self.num_rows, self._kinds)  # a pattern may have a megabyte

    @property
    def chunk_rows(self) -> tuple[int, ...] | None:
        if all(source.chunk_rows is None for source in self._sources):
            return None
        size = len(self._source_of)
        whole, rest = divmod(self.num_rows, size)
        return (size,) * whole + ((rest,) if rest else ())

    def take(self, row_ids: NDArray[np.int64], seed: Seed = (0, 0)) -> Columns:
        """The rows with these ids, in this order."""
        taken = empty_columns(self._kinds, len(row_ids))
        pattern, inside = np.divmod(row_ids, len(self._source_of))
        for i, source in enumerate(self._sources):
            wanted = np.flatnonzero(self._source_of[inside] == i)
            used = seed[1] * self._rows_per_epoch(i)  # by earlier epochs
            position = used + pattern[wanted] * self._counts[i] + self._before[i, inside[wanted]]
            passes = position // source.num_rows
            for number in np.unique(passes).tolist():
                here = passes == number
                rows = _pass_order(source, position[here] % source.num_rows, seed[0], i, number)
                for name, values in source.take(rows, (seed[0], number)).items():
                    taken[name][wanted[here]] = values
        return taken

    def fingerprint(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"kind": "mix", "rows": self.num_rows, "shares": self._counts.tolist()}
        for i, source in enumerate(self._sources):
            facts |= {f"source {i}, {name}": value for name, value in source.fingerprint().items()}
        return facts

    def _rows_per_epoch(self, i: int) -> int:
        whole, rest = divmod(self.num_rows, len(self._source_of))
        return int(whole * self._counts[i] + np.count_nonzero(self._source_of[:rest] == i))


class WeightedSource:
    """Rows of a source in proportion to their weights; see `weighted`."""

    def __init__(self, source: Source, weights: NDArray[np.float64], num_rows: int) -> None:
        self._source, self.num_rows = source, num_rows
        self.runs_user_code, self.decodes = source.runs_user_code, source.decodes
        self.columns, self.left_out = tuple(source.columns), source.left_out
        self._ends = np.cumsum(weights)  # on a line on which each row is as long as its weight
        sizes = [source.num_rows] if source.chunk_rows is None else source.chunk_rows
        expected = self._ends[np.cumsum(sizes) - 1] / self._ends[-1] * num_rows
        strata = strata_ends(expected, MIN_STRATUM_ROWS)
        self._stratum_ends = np.cumsum(sizes)[strata - 1]
        self._drawn_ends = np.rint(expected[strata - 1]).astype(np.int64)
        positive = np.where(weights > 0, np.arange(len(weights)), 0)
        self._last_row = np.maximum.accumulate(positive)[self._stratum_ends - 1]  # of each stratum, that has a weight

    @property
    def chunk_rows(self) -> tuple[int, ...] | None:
        if self._source.chunk_rows is None:
            return None
        return tuple(size for size in np.diff(self._drawn_ends, prepend=0).tolist() if size)

    def take(self, row_ids: NDArray[np.int64], seed: Seed = (0, 0)) -> Columns:
        """The rows with these ids, in this order. A row that is drawn again has random numbers of its own."""
        rows, times = self._drawn(row_ids, seed)
        if not self.runs_user_code:
            return self._source.take(rows, seed)
        numbers = np.unique(times).tolist()
        taken = {number: self._source.take(rows[times == number], (seed[0], seed[1] + (number << 32))) for number in numbers}
        if len(numbers) < 2:
            return taken[numbers[0]] if numbers else self._source.take(rows, seed)
        order = np.argsort(np.argsort(times, kind="stable"), kind="stable")
        return {name: np.concatenate([taken[number][name] for number in numbers])[order] for name in taken[0]}

    def fingerprint(self) -> dict[str, Any]:
        drawn = {"kind": "weighted", "rows": self.num_rows, "weights": f"{self._ends[-1]!r} in all"}
        return drawn | {f"source, {name}": value for name, value in self._source.fingerprint().items()}

    def _drawn(self, row_ids: RowIds, seed: Seed) -> tuple[RowIds, RowIds]:
        """The rows of the source, and how often each was drawn in this epoch before.

        Systematic sampling in each stratum: evenly spaced points on the line of weights, from a random first one on (Madow,
        Annals of Mathematical Statistics 20, 1949).
        """
        stratum = np.searchsorted(self._drawn_ends, row_ids, side="right")
        start = np.concatenate([[0], self._drawn_ends[:-1]])[stratum]
        before = np.concatenate([[0.0], self._ends[self._stratum_ends[:-1] - 1]])[stratum]
        spacing = (self._ends[self._stratum_ends - 1][stratum] - before) / (self._drawn_ends[stratum] - start)
        point = row_ids - start + uniform(len(self._stratum_ends), *seed, DRAWS)[stratum]
        rows = np.minimum(np.searchsorted(self._ends, before + point * spacing, side="right"), self._last_row[stratum])
        row_start = np.maximum(np.where(rows > 0, self._ends[rows - 1], 0.0), before)
        return rows, np.maximum(np.floor(point - (row_start - before) / spacing), 0).astype(np.int64)


def mix(shares: Mapping[Any, float] | Sequence[tuple[Any, float]], rows: int | None = None) -> MixedSource:
    """A source over several ones, in fixed proportions.

    Each source is used up, in shuffled order, before its rows come again; an epoch goes on where the one before has ended,
    so it need not have each row of each source once. Row numbers, as in the audit, are those of the mix.

    Args:
        shares: sources with their shares, such as {web: 0.7, books: 0.3}; relative to each other.
        rows: rows of an epoch; by default as many as all sources have together.

    Raises:
        DataError: a share is not positive, or the columns of the sources differ.
    """
    pairs = list(shares.items() if isinstance(shares, Mapping) else shares)
    if len(pairs) < 2:
        raise DataError("mix()", f"{len(pairs)} sources", "mixes at least two", "write raytrain.mix({a: 0.7, b: 0.3})")
    sources = [as_source(f"mix(), source {i}", value) for i, (value, _) in enumerate(pairs)]
    numbers = np.array([share for _, share in pairs], dtype=np.float64)
    _check_weights("mix()", "share of source", numbers, minimum=np.finfo(float).tiny)
    num_rows = _row_count("mix()", rows, sum(source.num_rows for source in sources))
    return MixedSource(sources, pattern_counts(sources, numbers / numbers.sum()), num_rows, _common_kinds(sources))


def weighted(source: Any, weights: str | ArrayLike, rows: int | None = None) -> WeightedSource:
    """A source that has the rows of another one in proportion to their weights, as PyTorch's WeightedRandomSampler.

    An epoch has each row as often as its weight says, rounded up or down at random. Row numbers, as in the audit, are those
    of the draws.

    Args:
        source: the rows.
        weights: the name of a column with one number per row, or one number for each row; none is negative.
        rows: rows of an epoch; by default as many as the source has.

    Raises:
        DataError: the column is missing, or a weight is negative, not finite, or there is none above 0.
    """
    source = as_source("weighted()", source)
    if isinstance(source, (MixedSource, WeightedSource)):
        rule, fix = "its row numbers mean the same rows in each epoch", "weight the sources, and then mix them"
        raise DataError("weighted()", f"a {source.fingerprint()['kind']} source", rule, fix)
    values = _column(source, weights) if isinstance(weights, str) else np.asarray(weights, dtype=np.float64)
    if values.shape != (source.num_rows,):
        found, fix = f"weights of shape {list(values.shape)}", "give one number for each row"
        raise DataError("weighted()", found, f"has one weight for each of {source.num_rows} rows", fix)
    _check_weights("weighted()", "weight of row", values, minimum=0.0)
    return WeightedSource(source, values, _row_count("weighted()", rows, source.num_rows))


def interleaved(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers 0 to len(counts) - 1, each as often as its count says, and evenly over the sequence. Shape [sum(counts)]."""
    numbers = np.repeat(np.arange(len(counts)), counts)
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts.tolist()])
    return numbers[np.argsort(places, kind="stable")]


def pattern_counts(sources: Sequence[Source], shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Rows of each source in a pattern: at least one, and where row groups allow, as many as one has."""
    means = [source.num_rows / len(source.chunk_rows) if source.chunk_rows else 0 for source in sources]
    size = int(
        np.clip(max(mean / share for mean, share in zip(means, shares, strict=True)), MIN_PATTERN_ROWS, MAX_PATTERN_ROWS)
    )
    ends = np.rint(np.cumsum(shares) * size).astype(np.int64)
    return np.maximum(np.diff(ends, prepend=0), 1)


def strata_ends(expected: NDArray[np.float64], least: float) -> RowIds:
    """Ends of the fewest groups of neighbours that have at least `least` draws each; the last one has at least as many.

    Args:
        expected: draws up to the end of each row group.
    """
    ends, drawn = [], 0.0
    for i, up_to in enumerate(expected.tolist()):
        if up_to - drawn >= least and expected[-1] - up_to >= least:
            ends.append(i + 1)
            drawn = up_to
    return np.array([*ends, len(expected)])


def _pass_order(source: Source, positions: RowIds, seed: int, i: int, number: int) -> RowIds:
    """Rows of a source at positions of its pass `number` in a mix, where it is source `i`."""
    plan = Plan(source.num_rows, source.chunk_rows, 1, 1, seed=seed ^ ((i + 1) << 32))
    return plan.epoch(number).rows_on_line(positions)


def _common_kinds(sources: Sequence[Source]) -> Kinds:
    """Dtype and row shape of each column. Raises DataError if they are not the same in all sources."""
    each = []
    for source in sources:
        row = source.take(np.zeros(1, np.int64))
        each.append({name: (values.dtype, values.shape[1:]) for name, values in row.items()})
    for i, kinds in enumerate(each):
        if kinds != each[0]:
            name = next(name for name in {**each[0], **kinds} if kinds.get(name) != each[0].get(name))
            first, other = (f"{k[name][0]} {list(k[name][1])}" if name in k else "absent" for k in (each[0], kinds))
            rule = f"all sources have the same columns; in source 0 it is {first}"
            raise DataError(f"mix(), column {name!r} of source {i}", other, rule, "choose or write the same columns for all")
    return each[0]


def _column(source: Source, name: str) -> NDArray[np.float64]:
    if name not in source.columns:
        raise missing_column("weighted()", name, source.columns)
    parts = range(0, source.num_rows, WEIGHTS_AT_ONCE)
    rows = (np.arange(start, min(start + WEIGHTS_AT_ONCE, source.num_rows)) for start in parts)
    return np.concatenate([source.take(some)[name].astype(np.float64) for some in rows])


def _check_weights(where: str, what: str, values: NDArray[np.float64], minimum: float) -> None:
    for i in np.flatnonzero(~(np.isfinite(values) & (values >= minimum)))[:1].tolist():
        rule = "weights are finite and not negative" if minimum == 0 else "shares are finite and above 0"
        raise DataError(where, f"{what} {i}: {values[i]:g}", rule, "correct it, or leave that one out")
    if not values.sum() > 0:
        raise DataError(where, "all weights are 0", "at least one weight is above 0", "correct the weights")


def _row_count(where: str, rows: int | None, default: int) -> int:
    if rows is not None and rows < 1:
        raise DataError(where, f"rows = {rows}", "an epoch has at least one row", "leave rows out, or give a larger number")
    return rows or default
