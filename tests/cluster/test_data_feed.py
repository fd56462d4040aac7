"""Feeds that read with Ray Data, on one Ray for the module. But for the last tests Ray Data takes over as soon as it can."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from numpy.typing import NDArray

from raytrain.data import ray_reader
from raytrain.data.arrays import arrays
from raytrain.data.direct_reader import DirectReader
from raytrain.data.feed import Feed, choose_reader
from raytrain.data.handover import Handover
from raytrain.data.parquet import ParquetSource, parquet
from raytrain.data.ray_reader import RayReader
from raytrain.data.reading import Columns, Reader, Transform, Unit, Work
from raytrain.errors import DataError, TaskError
from raytrain.plan.order import Plan


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ParquetSource:
    """30,000 rows in 60 row groups of columns of several types, "id" being the row's number."""
    directory = tmp_path_factory.mktemp("rows")
    for file in range(6):
        ids = np.arange(file * 5000, (file + 1) * 5000)
        columns = {
            "id": ids,
            "half": ids.astype("f2"),
            "flag": ids % 2 == 0,
            "byte": (ids % 256).astype("u1"),
            "vector": pa.FixedSizeListArray.from_arrays(np.repeat(ids, 6).astype("f4"), 6),
        }
        pq.write_table(pa.table(columns), directory / f"{file}.parquet", row_group_size=500)
    return parquet(directory)


class AtOnce(Handover):
    """Does not wait for Ray Data to run, else it would read little of the small data here."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._later = super().agree()

    def agree(self) -> Iterator[Unit]:
        return self._later


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_reader, "Handover", AtOnce)


RUN, AGREE = RayReader._run, Handover.agree


@contextmanager
def feeding(
    source: Any, plan: Plan, held: list[int], first: int, last: int, reader: Reader, transform: Transform | None = None
) -> Iterator[Feed]:
    feed = Feed(source, plan, transform, held, first_step=first, last_step=last, micro_batch=50, reader=reader)
    try:
        yield feed
    finally:
        feed.close()


def shaped(columns: Columns) -> Columns:
    return {**columns, "vector": columns["vector"].reshape(-1, 2, 3) * 2, "small": columns["id"].astype("i4")}


def noisy(columns: Columns) -> Columns:
    num_rows = len(columns["id"])
    noise = np.random.rand(num_rows), [random.random() for _ in range(num_rows)], torch.rand(num_rows)
    return {**columns, **dict(zip("npt", noise, strict=True))}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("transform", [None, shaped, noisy])
@pytest.mark.parametrize(("held", "first"), [([0, 1, 2], 0), ([0, 2], 217)])
def test_ray_data_and_direct_reading_give_identical_micro_batches(
    source: ParquetSource, held: list[int], first: int, transform: Transform | None
) -> None:
    plan = Plan(source.num_rows, source.chunk_rows, 128, 3, shuffle_window=3)
    last = first + plan.steps_per_epoch + 20
    with (
        feeding(source, plan, held, first, last, RayReader(), transform) as feed,
        feeding(source, plan, held, first, last, DirectReader(), transform) as direct,
    ):
        for step in range(first, last):
            got, wanted = feed.step(step), direct.step(step)
            assert list(got) == held
            for logical in held:
                rows = np.concatenate([one.rows for one in got[logical]])
                assert rows.tolist() == plan.rows(step, logical).tolist()
                for one, other in zip(got[logical], wanted[logical], strict=True):
                    assert one.columns["id"].tolist() == one.rows.tolist()
                    assert one.columns.keys() == other.columns.keys()
                    for name, values in one.columns.items():
                        assert values.dtype == other.columns[name].dtype
                        assert values.equal(other.columns[name])


@pytest.mark.usefixtures("at_once")
def test_a_step_that_is_redone_gets_the_same_rows_also_after_a_batch_was_written_to(source: ParquetSource) -> None:
    plan = Plan(source.num_rows, source.chunk_rows, 512, 1)
    with feeding(source, plan, [0], 0, 50, RayReader()) as feed:
        for step in range(50):
            for one in feed.step(step)[0]:
                one.columns["id"].zero_()
            again = feed.step(step)[0]
            assert [row for one in again for row in one.columns["id"].tolist()] == plan.rows(step, 0).tolist()


@pytest.mark.usefixtures("at_once")
def test_r13_the_same_order_after_a_restart_in_the_middle(source: ParquetSource) -> None:
    plan = Plan(source.num_rows, source.chunk_rows, 300, 2, seed=5)

    def rows(first: int, last: int) -> list[int]:
        with feeding(source, plan, [0, 1], first, last, RayReader()) as feed:
            return [
                row
                for step in range(first, last)
                for share in feed.step(step).values()
                for one in share
                for row in one.rows.tolist()
            ]

    assert rows(0, 33) + rows(33, 100) == rows(0, 100)
    assert sorted(rows(100, 200)) == list(range(source.num_rows))


class Unlucky(Exception):
    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


def fails_late(columns: Columns) -> Columns:
    if (columns["id"] == 29_999).any():
        raise Unlucky(29_999)
    return columns


def run_through(source: Any, transform: Transform | None, plan: Plan) -> None:
    with feeding(source, plan, [0], 0, plan.steps_per_epoch, RayReader(), transform) as feed:
        for step in range(plan.steps_per_epoch):
            feed.step(step)


@pytest.mark.usefixtures("at_once")
def test_an_exception_of_the_transform_comes_as_it_is_with_its_traceback(
    source: ParquetSource, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(source.num_rows, source.chunk_rows, 500, 1, shuffle=False)
    with pytest.raises(Unlucky) as caught:
        run_through(source, fails_late, plan)
    assert type(caught.value) is Unlucky
    assert caught.value.row == 29_999
    assert "in fails_late" in str(caught.value.__cause__)
    assert "fails_late" not in "".join(capfd.readouterr())


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())


def fails_locked(columns: Columns) -> Columns:
    if (columns["id"] == 29_999).any():
        raise Locked
    return columns


@pytest.mark.usefixtures("at_once")
def test_an_exception_that_cannot_be_pickled_comes_as_its_traceback(source: ParquetSource) -> None:
    plan = Plan(source.num_rows, source.chunk_rows, 500, 1, shuffle=False)
    with pytest.raises(TaskError, match="in fails_locked"):
        run_through(source, fails_locked, plan)


def loses_rows_late(columns: Columns) -> Columns:
    return {name: values[:-1] for name, values in columns.items()} if columns["id"][-1] > 20_000 else columns


@pytest.mark.usefixtures("at_once")
def test_an_error_of_the_data_comes_as_it_is(source: ParquetSource) -> None:
    plan = Plan(source.num_rows, source.chunk_rows, 500, 1, shuffle=False)
    with pytest.raises(DataError, match="499 rows") as caught:
        run_through(source, loses_rows_late, plan)
    assert type(caught.value) is DataError
    assert "it was given 500" in caught.value.rule


@pytest.mark.usefixtures("at_once")
def test_nothing_is_written_to_the_terminal(source: ParquetSource, capfd: pytest.CaptureFixture[str]) -> None:
    run_through(source, shaped, Plan(source.num_rows, source.chunk_rows, 500, 1))
    assert capfd.readouterr() == ("", "")


@ray.remote(num_cpus=1)
class Busy:
    def ready(self) -> bool:
        return True


@pytest.mark.usefixtures("at_once")
@pytest.mark.timeout(120)
def test_data_come_while_actors_have_all_cpus(source: ParquetSource) -> None:
    actors = [Busy.remote() for _ in range(2)]
    assert ray.get([actor.ready.remote() for actor in actors]) == [True, True]
    assert ray.available_resources().get("CPU", 0) == 0
    run_through(source, shaped, Plan(source.num_rows, source.chunk_rows, 500, 1))
    for actor in actors:
        ray.kill(actor)


class Tally:
    """Counts the units that were read: rows of `source` in chunks, and an actor that is told of each `take`."""

    columns = ("id",)

    def __init__(self, num_chunks: int, counter: Any) -> None:
        self.chunk_rows = (2000,) * num_chunks
        self.num_rows = 2000 * num_chunks
        self.counter = counter

    def take(self, rows: NDArray[np.int64]) -> Columns:
        ray.get(self.counter.add.remote())
        return {"id": rows.copy(), "wide": np.zeros((len(rows), 2**11), dtype="f8")}  # 32 MiB a window

    def fingerprint(self) -> dict[str, Any]:
        return {}


@ray.remote(num_cpus=0)
class Counter:
    def __init__(self, too_many: int) -> None:
        self.count, self.too_many = 0, too_many
        self.exceeded = asyncio.Event()

    async def add(self) -> None:
        self.count += 1
        if self.count >= self.too_many:
            self.exceeded.set()

    async def exceed(self) -> None:
        await self.exceeded.wait()

    async def value(self) -> int:
        return self.count


@pytest.mark.usefixtures("at_once")
def test_memory_is_bounded_while_the_training_stands_still() -> None:
    counter = Counter.remote(too_many=40)  # 512 MiB of finished blocks are 16 windows, and some are being handed over
    num_chunks = 60
    source = Tally(num_chunks, counter)
    plan = Plan(source.num_rows, source.chunk_rows, 2000, 1, shuffle_window=1)
    with feeding(source, plan, [0], 0, num_chunks, RayReader()) as feed:
        for step in range(3):
            feed.step(step)
        exceeded, _ = ray.wait([counter.exceed.remote()], timeout=3)
        assert not exceeded
        assert ray.get(counter.value.remote()) > 3
        for step in range(3, num_chunks):
            assert len(feed.step(step)[0]) == 40
        assert ray.get(counter.value.remote()) == num_chunks


@pytest.mark.usefixtures("at_once")
def test_close_returns_at_once_and_reading_stops(source: ParquetSource) -> None:
    plan = Plan(source.num_rows, source.chunk_rows, 100, 1)
    feed = Feed(source, plan, None, [0], first_step=0, last_step=10**6, micro_batch=None, reader=RayReader())
    for step in range(100):
        feed.step(step)
    parts = list(feed._parts)
    start = time.monotonic()
    feed.close()
    feed.close()
    assert time.monotonic() - start < 0.3
    assert all(part.join(30) for part in parts)


@pytest.mark.usefixtures("at_once")
def test_many_small_datasets_follow_each_other(source: ParquetSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_reader, "TASK_ROWS", 500)
    monkeypatch.setattr(ray_reader, "TASKS_PER_DATASET", 6)
    plan = Plan(source.num_rows, source.chunk_rows, 500, 1, shuffle_window=1)
    with feeding(source, plan, [0], 0, 24, RayReader()) as feed:
        for step in range(24):
            assert [row for one in feed.step(step)[0] for row in one.rows.tolist()] == plan.rows(step, 0).tolist()


def test_direct_reading_goes_on_until_ray_data_runs(source: ParquetSource, monkeypatch: pytest.MonkeyPatch) -> None:
    may_run, agreed = threading.Event(), threading.Event()
    handed_over: list[int] = []

    def run(self: RayReader, shipped: Any, tasks: list[list[Unit]]) -> Iterator[Any]:
        assert may_run.wait(60)
        yield from RUN(self, shipped, tasks)

    def agree(self: Handover) -> Iterator[Unit]:
        later = AGREE(self)
        handed_over.append(self._step or 0)
        agreed.set()
        return later

    monkeypatch.setattr(RayReader, "_run", run)
    monkeypatch.setattr(Handover, "agree", agree)
    plan = Plan(source.num_rows, source.chunk_rows, 500, 2)
    with (
        feeding(source, plan, [0, 1], 7, 1000, RayReader(), noisy) as feed,
        feeding(source, plan, [0, 1], 7, 1000, DirectReader(), noisy) as direct,
    ):
        step = 7
        while step < 67 or step < handed_over[0] + 30:
            got, wanted = feed.step(step), direct.step(step)
            for logical, share in got.items():
                for one, other in zip(share, wanted[logical], strict=True):
                    assert one.rows.tolist() == other.rows.tolist()
                    assert one.columns["t"].equal(other.columns["t"])
            step += 1
            if step == 67:
                assert not handed_over
                may_run.set()
                assert agreed.wait(60)


class Unreadable:
    """Cannot be unpickled."""

    def __call__(self, columns: Columns) -> Columns:
        return columns

    def __reduce__(self) -> Any:
        return fails_to_unpickle, ()


def fails_to_unpickle() -> None:
    raise Unlucky(0)


def test_an_error_at_the_start_of_ray_data_ends_direct_reading(source: ParquetSource) -> None:
    plan = Plan(source.num_rows, source.chunk_rows, 500, 1)
    with (
        feeding(source, plan, [0], 0, 10**6, RayReader(), Unreadable()) as feed,
        pytest.raises(Exception, match="raise Unlucky"),
    ):
        list(map(feed.step, range(10**6)))


def test_which_reader_is_chosen(source: ParquetSource) -> None:
    in_memory = arrays(id=np.arange(3))
    assert isinstance(choose_reader(in_memory, None), DirectReader)
    assert isinstance(choose_reader(in_memory, shaped), RayReader)
    assert isinstance(choose_reader(source, None), RayReader)
