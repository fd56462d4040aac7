from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raytrain.data.arrays import arrays
from raytrain.data.batch import MicroBatch
from raytrain.data.direct_reader import DirectReader
from raytrain.data.feed import Feed, choose_reader
from raytrain.data.parquet import parquet
from raytrain.data.reading import Block, Columns, Work
from raytrain.errors import DataError, InternalError
from raytrain.plan.order import Plan


class Numbered:
    """Rows whose only column is their number, in chunks or in memory."""

    columns = ("id",)

    def __init__(self, chunk_rows: tuple[int, ...] | None, num_rows: int) -> None:
        self.chunk_rows, self.num_rows = chunk_rows, num_rows
        self.taken: list[int] = []

    def take(self, rows: NDArray[np.int64]) -> Columns:
        self.taken.append(len(rows))
        return {"id": rows.copy()}

    def fingerprint(self) -> dict[str, Any]:
        return {}


@contextmanager
def feeding(source: Any, plan: Plan, held: list[int], first: int, last: int, **kwargs: Any) -> Iterator[Feed]:
    transform = kwargs.pop("transform", None)
    micro_batch = kwargs.pop("micro_batch", None)
    feed = Feed(
        source, plan, transform, held, first_step=first, last_step=last, micro_batch=micro_batch, reader=DirectReader()
    )
    try:
        yield feed
    finally:
        feed.close()


def rows_of(micro_batches: list[MicroBatch]) -> list[int]:
    for one in micro_batches:
        assert one.columns["id"].tolist() == one.rows.tolist()
    return [int(row) for one in micro_batches for row in one.rows]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, list[int], int, int, int | None]:
    num_logical = draw(st.integers(1, 4))
    chunks = draw(st.one_of(st.none(), st.lists(st.integers(1, 400), min_size=1, max_size=8).map(tuple)))
    num_rows = draw(st.integers(1, 1500)) if chunks is None else sum(chunks)
    batch = draw(st.integers(num_logical, 700))
    plan = Plan(
        num_rows,
        chunks,
        batch,
        num_logical,
        seed=draw(st.integers(0, 3)),
        shuffle=draw(st.booleans()),
        shuffle_window=draw(st.integers(1, 4)),
        drop_last=draw(st.booleans()) and num_rows >= batch,
    )
    held = sorted(draw(st.sets(st.integers(0, num_logical - 1), min_size=1)))
    first = draw(st.integers(0, 2 * plan.steps_per_epoch))
    last = first + draw(st.integers(1, min(60, 2 * plan.steps_per_epoch + 1)))
    return plan, held, first, last, draw(st.one_of(st.none(), st.integers(1, 64)))


@settings(max_examples=150, deadline=None)
@given(cases(), st.booleans())
def test_a_feed_delivers_the_rows_of_the_plan(
    case: tuple[Plan, list[int], int, int, int | None], with_transform: bool
) -> None:
    plan, held, first, last, micro_batch = case
    transform = dict if with_transform else None
    source = Numbered(plan.chunk_rows, plan.num_rows)
    with feeding(source, plan, held, first, last, transform=transform, micro_batch=micro_batch) as feed:
        for step in range(first, last):
            shares = feed.step(step)
            assert list(shares) == held
            for logical, micro_batches in shares.items():
                assert rows_of(micro_batches) == plan.rows(step, logical).tolist()
                sizes = [len(one.rows) for one in micro_batches]
                if micro_batch:
                    assert all(size == micro_batch for size in sizes[:-1])
                    assert all(0 < size <= micro_batch for size in sizes[-1:])
                else:
                    assert len(sizes) == bool(plan.share(step, logical))


def test_a_share_without_rows_in_a_short_step_is_an_empty_list() -> None:
    plan = Plan(9, None, 4, 4)
    with feeding(arrays(id=np.arange(9)), plan, [0, 3], 2, 3) as feed:
        shares = feed.step(2)
    assert len(rows_of(shares[0])) == 1
    assert shares[3] == []


@pytest.mark.parametrize("chunk_rows", [None, (50, 30, 20)])
def test_a_step_that_is_redone_gets_the_same_micro_batches_even_if_a_batch_was_changed(chunk_rows: Any) -> None:
    plan = Plan(100, chunk_rows, 8, 2)
    with feeding(Numbered(chunk_rows, 100), plan, [0, 1], 0, 30, micro_batch=3) as feed:
        for step in range(30):
            first = feed.step(step)
            wanted = {logical: [one.rows.tolist() for one in share] for logical, share in first.items()}
            for share in first.values():
                for one in share:
                    one.columns.pop("id").zero_()
            again = feed.step(step)
            assert {logical: [one.columns["id"].tolist() for one in share] for logical, share in again.items()} == wanted


@pytest.mark.parametrize("step", [3, 6, 10, 100])
def test_another_step_than_the_next_or_the_latest_is_refused(step: int) -> None:
    with feeding(arrays(id=np.arange(100)), Plan(100, None, 10, 1), [0], 4, 10) as feed:
        feed.step(4)
        with pytest.raises(InternalError):
            feed.step(step)


def test_r1_each_row_comes_once_in_an_epoch_whatever_the_workers() -> None:
    plan = Plan(1003, (100,) * 10 + (3,), 32, 3)
    source = Numbered(plan.chunk_rows, 1003)
    seen: list[int] = []
    for held, first, last in (([0, 1, 2], 0, 7), ([0], 7, 20), ([1, 2], 7, 20), ([0, 1, 2], 20, plan.steps_per_epoch)):
        with feeding(source, plan, held, first, last) as feed:
            for step in range(first, last):
                seen += [row for share in feed.step(step).values() for row in rows_of(share)]
    assert sorted(seen) == list(range(1003))


def epoch_rows(seed: int, epoch: int, *, restart_at: int | None = None) -> list[int]:
    plan = Plan(200, (40,) * 5, 10, 2, seed=seed)
    first, last = epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch
    cuts = [first, last] if restart_at is None else [first, first + restart_at, last]
    rows: list[int] = []
    for start, stop in itertools.pairwise(cuts):
        with feeding(Numbered(plan.chunk_rows, 200), plan, [0, 1], start, stop) as feed:
            for step in range(start, stop):
                rows += [row for share in feed.step(step).values() for row in rows_of(share)]
    return rows


def test_r13_a_new_order_each_epoch_and_the_same_for_the_same_seed() -> None:
    assert epoch_rows(0, 0) != epoch_rows(0, 1)
    assert epoch_rows(0, 0) != epoch_rows(1, 0)
    assert epoch_rows(0, 1) == epoch_rows(0, 1)


@pytest.mark.parametrize("restart_at", [1, 7, 19])
def test_r13_the_same_order_after_a_restart_in_the_middle(restart_at: int) -> None:
    assert epoch_rows(0, 1, restart_at=restart_at) == epoch_rows(0, 1)


def test_no_more_than_a_few_pieces_are_read_ahead() -> None:
    plan = Plan(100_000, None, 256, 1)
    source = Numbered(None, 100_000)
    with feeding(source, plan, [0], 0, plan.steps_per_epoch) as feed:
        for step in range(100):
            feed.step(step)
            assert len(source.taken) <= step + 1 + 2 + 2


def test_no_more_than_one_window_of_each_logical_worker_is_read_ahead() -> None:
    plan = Plan(100_000, (1000,) * 100, 200, 2, shuffle_window=2)
    source = Numbered(plan.chunk_rows, 100_000)
    with feeding(source, plan, [0, 1], 0, plan.steps_per_epoch) as feed:
        for step in range(200):
            feed.step(step)
            windows_in_use = 2 * (1 + step * 100 // 2000)
            assert len(source.taken) <= windows_in_use + 2


def test_an_error_of_the_transform_reaches_the_caller_as_it_is_after_the_good_rows() -> None:
    class Odd(Exception):
        pass

    calls = []

    def transform(columns: Columns) -> Columns:
        calls.append(1)
        if len(calls) == 3:
            raise Odd("row 600 is odd")
        return columns

    plan = Plan(2000, None, 256, 1)
    with feeding(arrays(id=np.arange(2000)), plan, [0], 0, 7, transform=transform) as feed:
        feed.step(0)
        feed.step(1)
        with pytest.raises(Odd, match="row 600"):
            feed.step(2)
        with pytest.raises(InternalError, match="has failed"):
            feed.step(2)


def test_r12_an_error_of_the_data_reaches_the_caller(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(4), "x": [[1, 2], [1, 2], [1], [1, 2, 3]]}), tmp_path / "a.parquet")
    source = parquet(tmp_path, columns=["id"])
    (tmp_path / "a.parquet").unlink()
    with feeding(source, Plan(4, source.chunk_rows, 2, 1), [0], 0, 2) as feed, pytest.raises(DataError, match=r"a\.parquet"):
        feed.step(0)


def test_the_transform_runs_in_the_thread_that_asks_for_the_step_since_its_random_generators_are_shared() -> None:
    threads = set()

    def transform(columns: Columns) -> Columns:
        threads.add(threading.current_thread())
        return columns

    with feeding(arrays(id=np.arange(2000)), Plan(2000, None, 100, 1), [0], 0, 20, transform=transform) as feed:
        list(map(feed.step, range(20)))
    assert threads == {threading.current_thread()}


def test_r12_a_transform_that_changes_a_type_between_batches_is_refused() -> None:
    calls = []

    def transform(columns: Columns) -> Columns:
        calls.append(1)
        return {"id": columns["id"].astype("f4" if len(calls) == 1 else "f8")}

    plan = Plan(20_000, None, 256, 1)
    with (
        feeding(arrays(id=np.arange(20_000)), plan, [0], 0, 70, transform=transform) as feed,
        pytest.raises(DataError, match="column 'id'"),
    ):
        list(map(feed.step, range(70)))


def test_close_returns_while_a_read_is_going_on_and_may_be_called_twice() -> None:
    reading, go = threading.Event(), threading.Event()

    class Slow(Numbered):
        def take(self, rows: NDArray[np.int64]) -> Columns:
            reading.set()
            go.wait(30)
            return super().take(rows)

    with feeding(Slow(None, 1000), Plan(1000, None, 10, 1), [0], 0, 100) as feed:
        assert reading.wait(10)
        feed.close()
        assert not go.is_set()
        feed.close()
        go.set()


def test_a_batch_may_be_written_to() -> None:
    plan = Plan(10, None, 10, 1)
    source = arrays(id=np.arange(10))
    with feeding(source, plan, [0], 0, 2) as feed:
        feed.step(0)[0][0].columns["id"].zero_()
        assert rows_of(feed.step(1)[0]) == plan.rows(1, 0).tolist()


def test_tensors_have_the_types_and_shapes_of_the_columns() -> None:
    columns = {"a": np.zeros((10, 2, 3), "f2"), "b": np.zeros(10, "?"), "c": np.zeros(10, "u1")}
    with feeding(arrays(**columns), Plan(10, None, 4, 1), [0], 0, 1) as feed:
        batch = feed.step(0)[0][0].columns
    assert (batch["a"].dtype, batch["a"].shape) == (torch.float16, (4, 2, 3))
    assert (batch["b"].dtype, batch["c"].dtype) == (torch.bool, torch.uint8)


def test_blocks_in_another_order_than_the_plan_are_refused() -> None:
    class Backwards(DirectReader):
        def parts(self, work: Work) -> Sequence[Callable[[], Iterator[Block]]]:
            return [lambda: reversed(list(super(Backwards, self).parts(work)[0]()))]

    source, plan = arrays(id=np.arange(1000)), Plan(1000, None, 10, 1)
    feed = Feed(source, plan, None, [0], first_step=0, last_step=99, micro_batch=None, reader=Backwards())
    with pytest.raises(InternalError, match="out of order"):
        feed.step(0)
    feed.close()


def test_without_ray_all_data_are_read_directly() -> None:
    assert isinstance(choose_reader(Numbered((5,), 5), lambda columns: columns), DirectReader)
