"""R1, R3, R13: the rows of each step, and the logical workers of each rank, for any data, batch and seed."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import raytrain.plan
from raytrain.plan import MAX_DRAWN_ROWS, Plan, Window, logical_workers_of, permutation, permuted

chunked = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(sum).map(tuple)
in_memory = st.integers(1, 80)


@st.composite
def plans(draw: st.DrawFn, chunks: st.SearchStrategy[tuple[int, ...] | int] = chunked | in_memory) -> Plan:
    data = draw(chunks)
    num_logical = draw(st.integers(1, 5))
    num_rows = data if isinstance(data, int) else sum(data)
    global_batch = draw(st.integers(num_logical, 20))
    return Plan(
        num_rows=num_rows,
        chunk_rows=None if isinstance(data, int) else data,
        global_batch=global_batch,
        num_logical=num_logical,
        seed=draw(st.integers(0, 2**62)),
        shuffle=draw(st.booleans()),
        shuffle_window=draw(st.integers(1, 5)),
        drop_last=draw(st.booleans()) and num_rows >= global_batch,
    )


def epoch_rows(plan: Plan, epoch: int) -> list[list[list[int]]]:
    """Rows of each step of an epoch, of each logical worker."""
    first = epoch * plan.steps_per_epoch
    return [
        [plan.row_ids(step, logical).tolist() for logical in range(plan.num_logical)]
        for step in range(first, first + plan.steps_per_epoch)
    ]


def flat(rows: list[list[list[int]]]) -> list[int]:
    return [row for step in rows for part in step for row in part]


@given(plans(), st.integers(0, 3))
@example(Plan(num_rows=3, chunk_rows=(3,), global_batch=4, num_logical=4), 0)
@example(Plan(num_rows=1, chunk_rows=None, global_batch=1, num_logical=1), 2)
def test_r1_each_row_is_in_exactly_one_step_of_an_epoch(plan: Plan, epoch: int) -> None:
    rows = Counter(flat(epoch_rows(plan, epoch)))
    assert set(rows.values()) == {1}
    assert set(rows) <= set(range(plan.num_rows))
    assert len(rows) == plan.num_rows - plan.num_dropped_rows
    assert plan.num_dropped_rows == (plan.num_rows % plan.global_batch if plan.drop_last else 0)


@given(plans())
def test_r3_each_step_but_the_last_has_the_global_batch(plan: Plan) -> None:
    sizes = [sum(map(len, step)) for step in epoch_rows(plan, 0)]
    assert sizes == [plan.rows_in_step(step) for step in range(plan.steps_per_epoch)]
    assert set(sizes[:-1]) <= {plan.global_batch}
    assert 0 < sizes[-1] <= plan.global_batch
    assert len(sizes) == (math.floor if plan.drop_last else math.ceil)(plan.num_rows / plan.global_batch)


@given(plans())
def test_r3_logical_workers_get_batches_of_equal_size_the_first_ones_one_row_more(plan: Plan) -> None:
    for step in range(plan.steps_per_epoch):
        sizes = [plan.batch_size(step, logical) for logical in range(plan.num_logical)]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        assert sum(sizes) == plan.rows_in_step(step)
        assert sizes == [len(plan.row_ids(step, logical)) for logical in range(plan.num_logical)]


@given(plans(), st.integers(0, 2))
def test_windows_tile_each_span_and_hold_its_rows(plan: Plan, epoch: int) -> None:
    line = plan.epoch(epoch)
    for logical in range(plan.num_logical):
        length = line.span_length(logical)
        windows = list(line.windows(logical))
        edges = [0, *[window.stop for window in windows]]
        assert [window.start for window in windows] == edges[:-1]
        assert edges[-1] == length
        assert all(window.start < window.stop for window in windows)
        by_window = [row for w in windows for row in line.span_row_ids(logical, w.start, w.stop).tolist()]
        by_step = [row for step in epoch_rows(plan, epoch) for row in step[logical]]
        assert by_window == by_step == line.span_row_ids(logical, 0, length).tolist()


@given(plans(), st.data())
def test_r13_any_part_of_a_span_is_the_same_whether_or_not_the_rest_was_read(plan: Plan, data: st.DataObject) -> None:
    logical = data.draw(st.integers(0, plan.num_logical - 1))
    whole = plan.epoch(1).span_row_ids(logical, 0, plan.epoch(1).span_length(logical))
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    plan = replace(plan)  # nothing cached
    assert plan.epoch(1).span_row_ids(logical, start, stop).tolist() == whole[start:stop].tolist()
    assert all(window.stop > start for window in plan.epoch(1).windows(logical, start))


@given(plans(chunked))
def test_a_window_has_rows_of_at_most_shuffle_window_chunks(plan: Plan) -> None:
    ends = np.cumsum(plan.chunk_rows)
    line = plan.epoch(0)
    for logical in range(plan.num_logical):
        for window in line.windows(logical):
            rows = line.span_row_ids(logical, window.start, window.stop)
            assert len(set(np.searchsorted(ends, rows, side="right").tolist())) <= plan.shuffle_window


@given(plans(chunked))
def test_only_chunks_at_the_ends_of_spans_are_read_by_two_logical_workers(plan: Plan) -> None:
    ends = np.cumsum(plan.chunk_rows)
    readers: Counter[int] = Counter()
    for logical in range(plan.num_logical):
        span = plan.epoch(0).span_row_ids(logical, 0, plan.epoch(0).span_length(logical))
        readers.update(set(np.searchsorted(ends, span, side="right").tolist()))
    assert sum(readers.values()) - len(readers) <= plan.num_logical - 1


@given(plans())
def test_without_shuffling_rows_come_in_source_order(plan: Plan) -> None:
    plain = Plan(plan.num_rows, plan.chunk_rows, plan.global_batch, plan.num_logical, shuffle=False)
    spans = [plain.epoch(0).span_row_ids(i, 0, plain.epoch(0).span_length(i)).tolist() for i in range(plan.num_logical)]
    assert [row for span in spans for row in span] == list(range(plan.num_rows))
    assert epoch_rows(plain, 1) == epoch_rows(plain, 0)


@pytest.mark.parametrize("chunk_rows", [None, (25,) * 40])
def test_r13_each_epoch_and_seed_has_its_own_reproducible_order(chunk_rows: tuple[int, ...] | None) -> None:
    plan, again, other = (Plan(1000, chunk_rows, 100, 3, seed=seed) for seed in (1, 1, 2))
    orders = [flat(epoch_rows(plan, 0)), flat(epoch_rows(plan, 1)), flat(epoch_rows(other, 0)), list(range(1000))]
    assert len({tuple(rows) for rows in orders}) == 4
    assert flat(epoch_rows(again, 1)) == orders[1]


def test_r13_the_rows_of_a_window_are_shuffled_and_so_are_its_chunks() -> None:
    plan = Plan(400, (100,) * 4, 400, 1, shuffle_window=2)
    first = plan.row_ids(0, 0)[:200]
    assert len(set((first // 100).tolist())) == 2
    assert np.count_nonzero(np.diff(first) == 1) < 20


def test_r13_in_memory_data_are_shuffled_as_a_whole() -> None:
    plan = Plan(40_000, None, 100, 1)
    assert next(plan.epoch(0).windows(0)) == Window(0, raytrain.plan.IN_MEMORY_WINDOW_ROWS)
    assert np.histogram(plan.row_ids(0, 0), bins=4, range=(0, 40_000))[0].min() > 10


def test_seeking_to_a_late_step_permutes_only_its_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def counting(length: int, *key: int) -> raytrain.plan.RowIds:
        drawn.append(length)
        return permutation(length, *key)

    monkeypatch.setattr(raytrain.plan, "permutation", counting)
    plan = Plan(num_rows=10_000_000, chunk_rows=(100,) * 100_000, global_batch=256, num_logical=8)
    plan.epoch(0)
    assert drawn == [100_000]
    drawn.clear()
    for step in range(plan.steps_per_epoch - 10, plan.steps_per_epoch):
        assert len(plan.row_ids(step, 5)) > 0
    assert sum(drawn) <= 10 * 2 * 4 * 100  # the one or two windows of 4 chunks that a step lies in


def test_the_order_of_a_large_in_memory_epoch_is_found_without_drawing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new generation, and each task of Ray Data, begins with a plan that has nothing cached."""
    monkeypatch.setattr(raytrain.plan, "permutation", None)
    tracemalloc.start()
    plan = Plan(num_rows=2_000_000_000, chunk_rows=None, global_batch=256, num_logical=8)
    rows = [int(row) for step in (0, 77, plan.steps_per_epoch + 5) for row in plan.row_ids(step, 5)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(set(rows)), peak < 4 * 2**20) == (96, True)
    assert plan.epoch(0).span_length(7) > 0
    assert max(rows) > 2**30, "rows come from the whole"


@given(st.integers(1, 3000), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4))
def test_a_permutation_that_is_not_drawn_has_each_number_once(length: int, key: list[int]) -> None:
    found = permuted(np.arange(length), length, *key)
    assert sorted(found.tolist()) == list(range(length))
    assert permuted(np.arange(length)[::-1], length, *key).tolist() == found[::-1].tolist()
    assert length < 30 or permuted(np.arange(length), length, *key, 1).tolist() != found.tolist()


@pytest.mark.parametrize("length", [MAX_DRAWN_ROWS + 1, 100_000, 1_000_003])
def test_r13_a_permutation_that_is_not_drawn_looks_random(length: int) -> None:
    """Chi-squared over pairs (where, what), and over the steps between neighbours; 99.9 % of random orders are below 340."""
    found = permuted(np.arange(length), length, 3, 1)
    assert len(np.unique(found)) == length
    where, what = np.arange(length) * 16 // length, found * 16 // length
    steps = (np.diff(found) % length) * 16 // length
    for pairs in (where * 16 + what, what[1:] * 16 + what[:-1], steps[1:] * 16 + steps[:-1], found % 256):
        counts = np.bincount(pairs, minlength=256)
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 340
    assert abs(np.count_nonzero(found[1:] > found[:-1]) / length - 0.5) < 0.01


@given(st.integers(0, 300), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4))
def test_a_permutation_has_each_number_once_and_depends_on_its_key_alone(length: int, key: list[int]) -> None:
    drawn = permutation(length, *key)
    assert drawn.dtype == np.int64
    assert sorted(drawn.tolist()) == list(range(length))
    np.random.seed(length)
    assert permutation(length, *key).tolist() == drawn.tolist()
    assert length < 30 or permutation(length, *key, 1).tolist() != drawn.tolist()


def test_r13_permutations_are_the_same_with_every_version_of_numpy() -> None:
    """Pinned: a resume with another numpy must find the same order. Never change these numbers."""
    assert permutation(8, 1, 2).tolist() == [5, 4, 1, 2, 0, 3, 6, 7]
    assert permutation(8).tolist() == [4, 3, 1, 7, 6, 5, 2, 0]
    assert permutation(5, -3, 2**40).tolist() == [3, 4, 0, 2, 1]
    assert permuted(np.arange(3), 10**12, 1, 2).tolist() == [782673990475, 437437780570, 19647312402]
    assert permuted(np.arange(5000, 5003), 70_000, -3, 2**40).tolist() == [42968, 25633, 58926]


def test_r13_plans_are_the_same_with_every_version_of_raytrain() -> None:
    """Pinned: a resume with another raytrain must find the same order. Never change these numbers."""
    chunks = Plan(num_rows=23, chunk_rows=(5, 3, 0, 7, 8), global_batch=6, num_logical=4, seed=7, shuffle_window=2)
    assert epoch_rows(chunks, 0) == [
        [[4, 3], [15, 16], [9], [14]],
        [[0, 1], [19, 21], [10], [12]],
        [[2, 5], [17, 18], [8], [11]],
        [[6, 7], [20], [22], [13]],
    ]
    assert epoch_rows(chunks, 1) == [
        [[15, 2], [20, 19], [7], [11]],
        [[0, 17], [22, 18], [9], [12]],
        [[4, 16], [6, 5], [8], [14]],
        [[3, 1], [21], [10], [13]],
    ]
    memory = Plan(num_rows=10, chunk_rows=None, global_batch=4, num_logical=3, seed=7)
    assert epoch_rows(memory, 0) == [[[6, 0], [1], [3]], [[9, 2], [4], [5]], [[7], [8], []]]


@pytest.mark.parametrize("num_logical", range(1, 41))
def test_ranks_run_each_logical_worker_once_as_equally_as_possible(num_logical: int) -> None:
    for num_ranks in range(1, num_logical + 1):
        parts = [logical_workers_of(rank, num_ranks, num_logical) for rank in range(num_ranks)]
        assert [logical for part in parts for logical in part] == list(range(num_logical))
        assert 1 <= min(map(len, parts)) <= max(map(len, parts)) <= min(map(len, parts)) + 1
    if num_logical == 8:
        assert [logical_workers_of(rank, 3, 8) for rank in range(3)] == [range(3), range(3, 6), range(6, 8)]
