from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raytrain.data import ray_reader
from raytrain.data.ray_reader import (
    LEAD_ROWS,
    LEAD_S,
    RayReader,
    ReaderSwitch,
    RemoteError,
    RemoteErrors,
    _dataset_after_dataset,
    _grouped,
    from_table,
    to_table,
)
from raytrain.data.reading import RawBatch, ReadRequest, ReadTask, RowBatch, read_task
from raytrain.errors import DataError, TaskError
from raytrain.plan import Plan
from tests.unit.data.rows import Numbered


def some_tasks(*lengths: int) -> list[ReadTask]:
    ends = np.cumsum(lengths).tolist()
    return [ReadTask(0, 0, end - n, end, end - n, end) for n, end in zip(lengths, ends, strict=True)]


def batch_of(task: ReadTask) -> RowBatch:
    return RowBatch(0, task.begin, np.arange(task.begin, task.end), {})


def test_read_tasks_share_a_ray_task_up_to_its_rows_and_a_larger_one_has_its_own() -> None:
    groups = list(_grouped(iter(some_tasks(10, 20, 70, 1, 300, 60, 40)), max_rows=100))
    assert [[task.end - task.begin for task in group] for group in groups] == [[10, 20, 70], [1], [300], [60, 40]]


def test_the_batches_of_all_datasets_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_reader, "FIRST_TASKS", 3)
    monkeypatch.setattr(ray_reader, "TASKS_PER_DATASET", 7)
    sizes = []

    def run(some: list[list[ReadTask]]) -> Iterator[RowBatch]:
        sizes.append(len(some))
        return (batch_of(task) for group in some for task in group)

    groups = _grouped(iter(some_tasks(*[5] * 100)), max_rows=10)
    batches = list(_dataset_after_dataset(run, groups))
    assert [row for batch in batches for row in batch.row_ids.tolist()] == list(range(500))
    assert sizes == [3] + [7] * 6 + [5]


def test_the_next_dataset_starts_while_the_latest_one_delivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_reader, "FIRST_TASKS", 6)
    started = threading.Semaphore(0)

    def run(some: list[list[ReadTask]]) -> Iterator[RowBatch]:
        started.release()
        for group in some:
            yield from map(batch_of, group)

    batches = _dataset_after_dataset(run, iter([[task] for task in some_tasks(*[5] * 60)]))
    assert next(batches).offset == 0
    assert started.acquire(timeout=10)
    next(batches)
    next(batches)
    assert started.acquire(timeout=10)  # four of its six tasks were left
    assert next(batches).offset == 15
    assert not started.acquire(blocking=False)  # one at a time
    batches.close()


def test_few_rows_are_read_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayReader, "_read_with_ray", lambda self, request, switch: iter(()))
    plan = Plan(10_000, None, 100, 2)
    streams = [RayReader().streams(ReadRequest(Numbered(10_000), plan, dict, (0, 1), 30, last)) for last in (50, 51)]
    assert [len(each) for each in streams] == [1, 2]


def test_an_error_at_the_start_of_ray_data_ends_direct_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.put", lambda value: 1 / 0)
    direct, with_ray = RayReader().streams(ReadRequest(Numbered(10_000), Plan(10_000, None, 100, 1), None, (0,), 0, 10**6))
    with pytest.raises(ZeroDivisionError):
        with_ray.next()
    assert sum(1 for _ in iter(direct.next, None)) < 100


def request_of(plan: Plan, assigned: tuple[int, ...], first: int, last: int) -> ReadRequest:
    return ReadRequest(Numbered(plan.chunk_rows or ()), plan, None, assigned, first, last)


def offsets(batches: list[RawBatch], logical: int) -> list[int]:
    parts = [raw.batch.part(raw.wanted) for raw in batches if raw.batch.logical == logical]
    return [part.offset + i for part in parts for i in range(len(part.row_ids))]


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=20),
    st.integers(1, 3),
    st.integers(20, 300),
    st.integers(0, 30),
    st.integers(0, 50),
    st.integers(1, 4),
)
@example([10] * 200, 1, 20, 0, 5, 1)
def test_r1_each_row_is_read_directly_or_by_ray_data_whenever_it_takes_over(
    chunks: list[int], num_logical: int, batch: int, first: int, read_before: int, window: int
) -> None:
    plan = Plan(sum(chunks), tuple(chunks), batch, num_logical, shuffle_window=window)
    request = request_of(plan, tuple(range(num_logical)), first, first + 2 * plan.steps_per_epoch)
    switch = ReaderSwitch(request)
    direct = switch.read_directly()
    batches = list(itertools.islice(direct, read_before))
    later = [raw for task in switch.agree() for raw in read_task(request, task)]
    batches += direct
    for logical in request.assigned:
        offset, steps = request.first_offset(logical), range(first, request.last_step)
        wanted = list(range(offset, offset + sum(plan.batch_size(step, logical) for step in steps)))
        assert offsets(batches, logical) + offsets(later, logical) == wanted


@pytest.mark.parametrize(
    ("read_rows", "elapsed_s", "lead"), [(50_000, 10.0, 5000 * LEAD_S), (1000, 0.5, 2000 * LEAD_S), (100, 10.0, LEAD_ROWS)]
)
def test_direct_reading_goes_on_at_its_pace_until_ray_data_delivers(read_rows: int, elapsed_s: float, lead: float) -> None:
    plan = Plan(10**6, (100,) * 10**4, 100, 1, shuffle_window=1)
    now = [0.0]
    switch = ReaderSwitch(request_of(plan, (0,), 0, 10**4), clock=lambda: now[0])
    direct = switch.read_directly()
    for _ in range(read_rows // 100):
        next(direct)
    now[0] = elapsed_s
    first = next(switch.agree())
    assert 0 <= first.epoch * plan.num_rows + first.begin - read_rows - lead <= 200


def test_two_threads_divide_the_tasks_without_loss() -> None:
    plan = Plan(10_000, (10,) * 1000, 100, 2, shuffle_window=1)
    switch = ReaderSwitch(request_of(plan, (0, 1), 0, 200))
    later: list[ReadTask] = []
    begun = threading.Event()

    def agree() -> None:
        begun.wait(10)
        later.extend(switch.agree())

    thread = threading.Thread(target=agree)
    thread.start()
    rows = 0
    for raw in switch.read_directly():
        begun.set()
        rows += raw.num_wanted
    thread.join()
    assert rows + sum(task.end - task.begin for task in later) == 20_000


def sent(error: Exception) -> RemoteError:
    with pytest.raises(RemoteError) as caught, RemoteErrors():
        raise error
    caught.value.args = (*caught.value.args, "a hint that Ray Data added")
    received = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(received, RemoteError)
    return received


def test_a_remote_exception_is_reraised_as_it_was_with_its_traceback() -> None:
    received = sent(DataError("where", 3, "rule", "fix"))
    with pytest.raises(DataError) as caught:
        received.reraise()
    assert caught.value.args == ("where", 3, "rule", "fix")
    assert caught.value.__cause__ is received
    assert "in sent" in str(received)


def test_a_remote_exception_that_cannot_be_pickled_is_reraised_as_its_traceback() -> None:
    with pytest.raises(TaskError, match="in sent"):
        sent(ValueError(threading.Lock())).reraise()
    with pytest.raises(KeyboardInterrupt), RemoteErrors():
        raise KeyboardInterrupt


def row_batch(logical: int, first: int, count: int, dtype: str = "int64", shape: tuple[int, ...] = ()) -> RowBatch:
    row_ids = np.arange(first, first + count)
    values = np.broadcast_to(row_ids.reshape(-1, *([1] * len(shape))), (count, *shape)).astype(dtype)
    return RowBatch(logical, first + 2**40, row_ids, {"x": values, "id": row_ids})


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "uint16", "float16", "float64", "complex64"])
@pytest.mark.parametrize("shape", [(), (2, 3), (2, 0)])
def test_types_and_shapes_survive_the_arrow_codec(dtype: str, shape: tuple[int, ...]) -> None:
    batch = row_batch(1, 5, 4, dtype, shape)
    (got,) = from_table(to_table(batch))
    assert (got.logical, got.offset, got.row_ids.tolist()) == (1, 5 + 2**40, [5, 6, 7, 8])
    assert (got.columns["x"].dtype, got.columns["x"].shape) == (dtype, (4, *shape))
    assert (got.columns["x"] == batch.columns["x"]).all()
    assert np.shares_memory(got.columns["id"], batch.columns["id"])


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=6), st.data())
def test_tables_may_be_joined_and_cut(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    batches = [row_batch(logical, 10 * i, count, shape=(2,)) for i, (logical, count) in enumerate(sizes)]
    joined = pa.concat_tables([to_table(batch) for batch in batches])
    if data.draw(st.booleans()):
        joined = joined.combine_chunks()
    cut = data.draw(st.integers(0, joined.num_rows))
    got = [batch for table in (joined[:cut], joined[cut:]) for batch in from_table(table)]
    rows = [(batch.logical, int(row)) for batch in got for row in batch.row_ids]
    assert rows == [(batch.logical, int(row)) for batch in batches for row in batch.row_ids]
    assert all((batch.row_ids == batch.offset - 2**40 + np.arange(len(batch.row_ids))).all() for batch in got)
    assert all((batch.columns["x"] == batch.row_ids[:, None]).all() for batch in got)
