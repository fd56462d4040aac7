from __future__ import annotations

import pickle
import threading
import warnings
from collections.abc import Sequence
from contextlib import closing
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

from raytrain.data.in_memory import arrays, dataset
from raytrain.data.loader import Loader, MicroBatch, choose_reader, to_tensors
from raytrain.data.parquet import parquet
from raytrain.data.prefetch import OnDemand
from raytrain.data.ray_reader import RayReader
from raytrain.data.reading import LocalReader, ReadRequest, Stream
from raytrain.data.source import Columns, Seed
from raytrain.errors import DataError, InternalError
from raytrain.plan import Plan, logical_workers_of
from raytrain.worker.hooks import on_device
from tests.unit.data.rows import Numbered


def loading(
    source: Any,
    plan: Plan,
    assigned: Sequence[int],
    first: int,
    last: int,
    transform: Any = None,
    micro_batch: int | None = None,
) -> closing[Loader]:
    request = ReadRequest(source, plan, transform, tuple(assigned), first, last)
    return closing(Loader(request, micro_batch, LocalReader()))


def row_ids_of(micro_batches: list[MicroBatch]) -> list[int]:
    for micro in micro_batches:
        assert micro.columns["id"].tolist() == micro.row_ids.tolist()
    return [int(row) for micro in micro_batches for row in micro.row_ids]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    num_logical = draw(st.integers(1, 4))
    chunks = draw(st.one_of(st.none(), st.lists(st.integers(1, 400), min_size=1, max_size=8).map(tuple)))
    num_rows = draw(st.integers(1, 1500)) if chunks is None else sum(chunks)
    batch = draw(st.integers(num_logical, 700))
    return Plan(
        num_rows,
        chunks,
        batch,
        num_logical,
        seed=draw(st.integers(0, 3)),
        shuffle=draw(st.booleans()),
        shuffle_window=draw(st.integers(1, 4)),
        drop_last=draw(st.booleans()) and num_rows >= batch,
    )


@settings(max_examples=50)
@given(plans(), st.data())
def test_a_loader_delivers_the_rows_of_the_plan(plan: Plan, data: st.DataObject) -> None:
    assigned = sorted(data.draw(st.sets(st.integers(0, plan.num_logical - 1), min_size=1)))
    first = data.draw(st.integers(0, 2 * plan.steps_per_epoch))
    last = first + data.draw(st.integers(1, min(30, 2 * plan.steps_per_epoch + 1)))
    transform = data.draw(st.sampled_from([None, dict]))
    micro_batch = data.draw(st.one_of(st.none(), st.integers(1, 64)))
    source = Numbered(plan.chunk_rows or plan.num_rows, decodes=data.draw(st.booleans()))
    with loading(source, plan, assigned, first, last, transform, micro_batch) as loader:
        for step in range(first, last):
            batches = loader.step(step)
            assert list(batches) == assigned
            for logical, micro_batches in batches.items():
                assert row_ids_of(micro_batches) == plan.row_ids(step, logical).tolist()
                sizes = [len(micro.row_ids) for micro in micro_batches]
                size = micro_batch or plan.batch_size(step, logical)
                assert set(sizes[:-1]) <= {size}
                assert all(0 < last_size <= size for last_size in sizes[-1:])


def test_a_logical_worker_without_rows_in_a_short_step_has_no_micro_batches() -> None:
    with loading(arrays(id=np.arange(9)), Plan(9, None, 4, 4), [0, 3], 2, 3) as loader:
        batches = loader.step(2)
    assert len(row_ids_of(batches[0])) == 1
    assert batches[3] == []


@pytest.mark.parametrize("rows", [100, (50, 30, 20)])
def test_a_repeated_step_has_the_same_micro_batches_even_if_a_hook_wrote_to_one(rows: Any) -> None:
    source = Numbered(rows)
    with loading(source, Plan(100, source.chunk_rows, 8, 2), [0, 1], 0, 30, micro_batch=3) as loader:
        for step in range(30):
            first = loader.step(step)
            wanted = {logical: [micro.row_ids.tolist() for micro in batches] for logical, batches in first.items()}
            for batches in first.values():
                for micro in batches:
                    micro.columns.pop("id").zero_()
            again = loader.step(step)
            assert {i: [micro.columns["id"].tolist() for micro in batches] for i, batches in again.items()} == wanted


@pytest.mark.parametrize("step", [3, 6, 10, 100])
def test_a_step_other_than_the_next_or_the_latest_is_refused(step: int) -> None:
    with loading(arrays(id=np.arange(100)), Plan(100, None, 10, 1), [0], 4, 10) as loader:
        loader.step(4)
        with pytest.raises(InternalError):
            loader.step(step)


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 20)), min_size=1, max_size=5), st.integers(0, 1))
def test_r1_r13_each_row_comes_once_in_an_epoch_whatever_the_workers(resizes: list[tuple[int, int]], epoch: int) -> None:
    plan = Plan(1003, (100,) * 10 + (3,), 32, 3, seed=epoch)
    source = Numbered(plan.chunk_rows or ())
    first, end = epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch
    seen: list[int] = []
    by_step: dict[int, list[list[int]]] = {}
    for num_workers, num_steps in [*resizes, (1, plan.steps_per_epoch)]:
        last = min(first + num_steps, end)
        for rank in range(num_workers if last > first else 0):
            with loading(source, plan, logical_workers_of(rank, num_workers, 3), first, last) as loader:
                for step in range(first, last):
                    by_step.setdefault(step, []).extend(row_ids_of(batches) for batches in loader.step(step).values())
        first = last
    seen = [row for parts in by_step.values() for part in parts for row in part]
    assert sorted(seen) == list(range(1003))
    assert seen != sorted(seen)
    assert all(parts == [plan.row_ids(step, i).tolist() for i in range(3)] for step, parts in by_step.items())


def test_only_a_few_batches_of_in_memory_data_are_read_ahead() -> None:
    source = Numbered(100_000)
    with loading(source, Plan(100_000, None, 256, 1), [0], 0, 390) as loader:
        for step in range(100):
            loader.step(step)
            assert len(source.taken) <= step + 1 + 2 + 2


class Odd(Exception):
    pass


def test_an_error_of_the_transform_is_raised_as_it_is_after_the_good_rows() -> None:
    threads = []

    def transform(columns: Columns) -> Columns:
        threads.append(threading.current_thread())
        if len(threads) == 3:
            raise Odd("row 600 is odd")
        return columns

    with loading(arrays(id=np.arange(2000)), Plan(2000, None, 256, 1), [0], 0, 7, transform) as loader:
        loader.step(0)
        loader.step(1)
        with pytest.raises(Odd, match="row 600"):
            loader.step(2)
        with pytest.raises(InternalError, match="has failed"):
            loader.step(2)
    assert set(threads) == {threading.current_thread()}, "the transform uses random generators of the training thread"


class Augmented:
    """Rows that draw a random number; records the threads that read them."""

    threads: set[threading.Thread] = set()
    num_read = 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.threads.add(threading.current_thread())
        self.num_read += 1
        return {"id": row, "noise": torch.rand(1)}


def test_r13_the_training_thread_reads_rows_that_draw_from_its_random_generators() -> None:
    def noise_of(first: int, assigned: Sequence[int]) -> dict[tuple[int, int], float]:
        """By epoch and row."""
        with loading(source, plan, assigned, first, 2 * plan.steps_per_epoch, micro_batch=7) as loader:
            steps = [(step, loader.step(step)) for step in range(first, 2 * plan.steps_per_epoch)]
        return {
            (step // plan.steps_per_epoch, int(row)): float(micro.columns["noise"][i])
            for step, batches in steps
            for micros in batches.values()
            for micro in micros
            for i, row in enumerate(micro.row_ids)
        }

    source, plan = dataset(Augmented()), Plan(1000, None, 30, 2, seed=3)
    whole, part = noise_of(0, [0, 1]), noise_of(40, [1])
    assert Augmented.threads == {threading.current_thread()}
    assert len(whole) == 2000
    assert part == {key: whole[key] for key in part}
    assert sum(whole[0, row] == whole[1, row] for row in range(1000)) < 10, "each epoch has its own augmentation"


def test_rows_of_a_dataset_are_read_when_their_step_wants_them() -> None:
    rows = Augmented()
    source, plan = dataset(rows), Plan(1000, None, 30, 2, seed=3)
    before = rows.num_read
    with loading(source, plan, [0, 1], 5, 9) as loader:
        for step in range(5, 9):
            loader.step(step)
            assert rows.num_read - before == (step - 4) * 30


def test_r12_an_error_of_the_data_names_the_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(4)}), tmp_path / "a.parquet")
    source = parquet(tmp_path)
    (tmp_path / "a.parquet").unlink()
    with (
        loading(source, Plan(4, source.chunk_rows, 2, 1), [0], 0, 2) as loader,
        pytest.raises(DataError, match=r"a\.parquet"),
    ):
        loader.step(0)


def test_r12_a_transform_that_changes_a_type_between_batches_is_refused() -> None:
    types = iter("f" + "d" * 99)
    transform = lambda columns: {"id": columns["id"].astype(next(types))}  # noqa: E731
    with (
        loading(arrays(id=np.arange(20_000)), Plan(20_000, None, 256, 1), [0], 0, 70, transform) as loader,
        pytest.raises(DataError, match="column 'id'"),
    ):
        list(map(loader.step, range(70)))


def test_close_returns_during_a_read_and_is_idempotent() -> None:
    reading, go = threading.Event(), threading.Event()

    class Slow(Numbered):
        def take(self, row_ids: NDArray[np.int64], seed: Seed = (0, 0)) -> Columns:
            reading.set()
            go.wait(30)
            return super().take(row_ids, seed)

    with loading(Slow(1000), Plan(1000, None, 10, 1), [0], 0, 100) as loader:
        assert reading.wait(10)
        loader.close()
        assert not go.is_set()
    go.set()


def test_batches_in_another_order_than_the_plan_are_refused() -> None:
    class Backwards(LocalReader):
        def streams(self, request: ReadRequest) -> Sequence[Stream]:
            forwards = super().streams(request)[0]
            return [OnDemand(lambda: reversed(list(iter(forwards.next, None))))]

    request = ReadRequest(arrays(id=np.arange(1000)), Plan(1000, None, 10, 1), None, (0,), 0, 99)
    with closing(Loader(request, None, Backwards())) as loader, pytest.raises(InternalError, match="out of order"):
        loader.step(0)


@pytest.mark.parametrize(
    ("source", "transform", "reader"),
    [
        (Numbered(5), None, LocalReader),
        (Numbered((5,)), None, LocalReader),
        (Numbered((5,)), dict, RayReader),
        (dataset(Augmented()), None, RayReader),
    ],
)
def test_auto_means_ray_data_where_rows_are_computed(
    source: Any, transform: Any, reader: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(choose_reader("auto", source, transform), LocalReader)  # without Ray
    monkeypatch.setattr("raytrain.data.loader.ray_is_running", lambda: True)
    assert isinstance(choose_reader("auto", source, transform), reader)
    assert isinstance(choose_reader("local", source, transform), LocalReader)
    assert isinstance(choose_reader("ray", source, transform), RayReader)


def test_a_missing_column_of_a_batch_names_the_nearest_one() -> None:
    batch = to_tensors({"pixels": np.zeros((2, 3)), "label": np.zeros(2)})
    with pytest.raises(DataError, match="did you mean 'label'") as caught:
        batch["lable"]
    assert "pixels, label" in caught.value.rule
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert batch.get("y") is None
    assert "y" not in batch


def test_a_column_that_was_left_out_is_named_with_its_type_in_a_hook_and_in_a_transform() -> None:
    source, plan = dataset([(1.0, b"raw"), (2.0, b"row")]), Plan(2, None, 2, 1)
    with loading(source, plan, [0], 0, 1) as loader:
        batch = on_device(loader.step(0)[0][0].columns, torch.device("meta"))
    with pytest.raises(DataError, match=r"column '1' is left out: type \|S3: b'raw'"):
        batch["1"]
    with pytest.raises(DataError, match=r'write batch\["0"\]'):
        batch[0]
    transform = lambda columns: {"pixels": columns["1"]}  # noqa: E731
    with loading(source, plan, [0], 0, 1, transform) as loader, pytest.raises(DataError, match="column '1' is left out"):
        loader.step(0)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float16", "float32", "float64"])
def test_tensors_keep_type_and_shape_and_share_memory_with_writable_arrays(dtype: str) -> None:
    values = np.ones((4, 2), dtype=dtype)
    tensor = to_tensors({"x": values})["x"]
    assert (str(tensor.dtype), tensor.shape) == (f"torch.{dtype}", (4, 2))
    assert tensor.data_ptr() == values.ctypes.data


def test_read_only_arrays_are_copied_without_a_warning() -> None:
    values = np.arange(3)
    values.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = to_tensors({"x": values})["x"]
    tensor[0] = 7
    assert values.tolist() == [0, 1, 2]
