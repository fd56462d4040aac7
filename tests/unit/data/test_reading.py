from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from raytrain.data.in_memory import arrays
from raytrain.data.reading import (
    RawBatch,
    ReadRequest,
    RowBatch,
    by_first_use,
    first_rows,
    read_in_order,
    read_tasks,
    transformed,
)
from raytrain.data.source import Columns
from raytrain.errors import DataError
from raytrain.plan import Plan
from tests.unit.data.rows import Numbered


def read(request: ReadRequest) -> list[RawBatch]:
    return list(read_in_order(request, {logical: read_tasks(request, logical) for logical in request.assigned}))


def test_read_tasks_are_the_windows_that_the_steps_need_over_epochs() -> None:
    plan = Plan(100, (10,) * 10, 10, 2, shuffle_window=2)
    tasks = list(read_tasks(ReadRequest(Numbered((10,) * 10), plan, None, (1,), 5, 23), 1))
    assert [task.epoch for task in tasks] == [0, 0, 1, 1, 1, 2]
    assert (tasks[0].begin, tasks[-1].end) == (25, 15)
    assert sum(task.end - task.begin for task in tasks) == 18 * 5


def test_read_tasks_of_all_logical_workers_come_in_order_of_first_use() -> None:
    plan = Plan(120, (7,) * 17 + (1,), 12, 3, shuffle_window=2)
    request = ReadRequest(Numbered((7,) * 17 + (1,)), plan, None, (0, 2), 3, 25)
    tasks = list(by_first_use(request, {logical: read_tasks(request, logical) for logical in (0, 2)}))
    first_uses = [task.epoch * plan.steps_per_epoch + task.begin // 4 for task in tasks]
    assert first_uses == sorted(first_uses)
    assert {task.logical for task in tasks} == {0, 2}


def test_each_window_is_taken_once_and_cut_in_raw_batches() -> None:
    source = Numbered((1000,) * 3)
    request = ReadRequest(source, Plan(3000, source.chunk_rows, 10, 1, shuffle_window=2), None, (0,), 0, 300)
    batches = read(request)
    assert source.taken == [2000, 1000]
    assert max(len(raw.batch.row_ids) for raw in batches) == 260


def test_what_a_transform_sees_does_not_depend_on_the_first_and_last_step() -> None:
    def seen(first: int, last: int) -> list[list[int]]:
        seen: list[list[int]] = []

        def transform(columns: Columns) -> Columns:
            seen.append(columns["id"].tolist())
            return columns

        plan = Plan(3000, (1000,) * 3, 10, 1, shuffle_window=2)
        request = ReadRequest(Numbered((1000,) * 3), plan, transform, (0,), first, last)
        batches = [transformed(transform, raw) for raw in read(request)]
        assert sum(len(batch.row_ids) for batch in batches) == (last - first) * 10
        return seen

    whole = seen(0, 300)
    for first, last in ((1, 2), (37, 120), (201, 300), (299, 300)):
        part = seen(first, last)
        start = whole.index(part[0])
        assert whole[start : start + len(part)] == part


def test_row_batches_have_the_rows_of_their_ids() -> None:
    plan = Plan(700, None, 7, 2, seed=3)
    request = ReadRequest(arrays(id=np.arange(700)), plan, lambda c: {"twice": c["id"] * 2}, (0, 1), 3, 80)
    for raw in read(request):
        batch = transformed(request.transform, raw)
        assert len(batch.row_ids) == raw.num_wanted
        assert (batch.columns["twice"] == batch.row_ids * 2).all()


def noisy(columns: Columns) -> Columns:
    """Numbers from the generators of numpy, Python and PyTorch."""
    num_rows = len(columns["id"])
    noise = np.random.rand(num_rows), [random.random() for _ in range(num_rows)], torch.rand(num_rows).numpy()
    return dict(zip("npt", noise, strict=True))


def noise_of(plan: Plan, first: int, last: int) -> dict[int, list[float]]:
    """Random numbers by row id."""
    request = ReadRequest(arrays(id=np.arange(plan.num_rows)), plan, noisy, (0,), first, last)
    batches = [transformed(noisy, raw) for raw in read(request)]
    return {int(row): [float(b.columns[name][i]) for name in "npt"] for b in batches for i, row in enumerate(b.row_ids)}


def test_r13_random_numbers_of_a_transform_follow_from_the_seed_and_the_batch_alone() -> None:
    plan = Plan(1000, None, 10, 1, seed=4)
    whole = noise_of(plan, 0, 100)
    np.random.seed(99), random.seed(99), torch.manual_seed(99)
    part = noise_of(plan, 37, 81)
    assert len(part) == 440
    assert part == {row: whole[row] for row in part}


def test_r13_random_numbers_of_a_transform_differ_between_batches_epochs_and_seeds() -> None:
    plan, other = Plan(1000, None, 10, 1, seed=4), Plan(1000, None, 10, 1, seed=5)
    seen = [noise_of(plan, 0, 100), noise_of(plan, 100, 200), noise_of(other, 0, 100)]
    for position in range(3):
        values = {numbers[position] for by_row in seen for numbers in by_row.values()}
        assert len(values) > 2900  # no batch has the numbers of another; a few of PyTorch's may be equal


def test_r13_a_transform_with_a_random_generator_of_its_own_is_refused_in_the_warm_up() -> None:
    source, rows, generator = arrays(id=np.arange(9)), np.arange(4), np.random.default_rng(0)

    def halves_in_place(columns: Columns) -> Columns:
        columns["id"] //= 2
        return columns

    assert first_rows(source, None, rows)["id"].tolist() == [0, 1, 2, 3]
    assert first_rows(source, halves_in_place, rows)["id"].tolist() == [0, 0, 1, 1]
    assert first_rows(source, noisy, rows).keys() == {"n", "p", "t"}
    with pytest.raises(DataError, match=r"transform, column 'noise'\n.*differs each time for the same rows"):
        first_rows(source, lambda columns: {"noise": generator.random(len(columns["id"]))}, rows)
    with pytest.raises(DataError, match="here 4"):
        first_rows(source, lambda columns: {"id": columns["id"][1:]}, rows)


def raw_batch(wanted: slice) -> RawBatch:
    return RawBatch(RowBatch(0, 0, np.arange(10), {"id": np.arange(10)}), (0, 0, 0, 0), wanted)


def test_unwanted_rows_are_transformed_too_and_dropped() -> None:
    batch = transformed(lambda c: {"sum": c["id"] + c["id"].sum()}, raw_batch(slice(3, 5)))
    assert batch.offset == 3
    assert batch.row_ids.tolist() == [3, 4]
    assert batch.columns["sum"].tolist() == [48, 49]


@pytest.mark.parametrize(
    ("transform", "parts"),
    [
        (lambda c: {"id": c["id"][:-1]}, ["9 rows", "here 10"]),
        (lambda c: c["id"], ["returned ndarray"]),
        (lambda c: {"name": np.array(["a"] * 10)}, ["column 'name'"]),
        (lambda c: {"one": 1}, ["column 'one'"]),
    ],
)
def test_r12_a_transform_must_return_columns_with_as_many_rows(transform: Any, parts: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        transformed(transform, raw_batch(slice(0, 10)))
    assert all(part in str(caught.value) for part in ["transform", *parts])
