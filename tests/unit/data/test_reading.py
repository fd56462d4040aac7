from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raytrain.data.arrays import arrays
from raytrain.data.reading import Columns, Work, by_first_use, in_order_of_use, units
from raytrain.data.transforming import transformed
from raytrain.plan.order import Plan


class Chunked:
    """Rows in chunks, that counts what is taken."""

    columns = ("id",)

    def __init__(self, *chunk_rows: int) -> None:
        self.chunk_rows = chunk_rows
        self.num_rows = sum(chunk_rows)
        self.taken: list[int] = []

    def take(self, rows: NDArray[np.int64]) -> Columns:
        self.taken.append(len(rows))
        return {"id": rows.copy()}

    def fingerprint(self) -> dict[str, Any]:
        return {}


def work(source: Any, plan: Plan, first: int, last: int, transform: Any = None, held: tuple[int, ...] = (0,)) -> Work:
    return Work(source, plan, transform, held, first, last)


def test_units_are_the_windows_that_the_steps_need_over_epochs() -> None:
    plan = Plan(100, (10,) * 10, 10, 2, shuffle_window=2)
    made = list(units(work(Chunked(*plan.chunk_rows or ()), plan, 5, 23), 1))
    assert [unit.epoch for unit in made] == [0, 0, 1, 1, 1, 2]
    assert made[0].begin == 25
    assert made[-1].end == 15
    assert sum(unit.end - unit.begin for unit in made) == 18 * 5


def test_units_of_all_logical_workers_come_in_the_order_of_first_use() -> None:
    plan = Plan(120, (7,) * 17 + (1,), 12, 3, shuffle_window=2)
    job = work(Chunked(*plan.chunk_rows or ()), plan, 3, 25, held=(0, 2))
    made = list(by_first_use(job, {logical: units(job, logical) for logical in job.held}))
    first_uses = [unit.epoch * plan.steps_per_epoch + unit.begin // 4 for unit in made]
    assert first_uses == sorted(first_uses)
    assert {unit.logical for unit in made} == {0, 2}


def test_chunked_data_are_taken_once_for_each_window_and_cut_in_pieces() -> None:
    source = Chunked(1000, 1000, 1000)
    plan = Plan(3000, source.chunk_rows, 10, 1, shuffle_window=2)
    job = work(source, plan, 0, 300)
    made = list(in_order_of_use(job, {0: units(job, 0)}))
    assert source.taken == [2000, 1000]
    assert max(len(piece.block.rows) for piece in made) == job.piece_rows == 256


def test_what_a_transform_sees_does_not_depend_on_where_reading_starts_or_ends() -> None:
    plan = Plan(3000, (1000,) * 3, 10, 1, shuffle_window=2)

    def pieces(first: int, last: int) -> list[list[int]]:
        seen: list[list[int]] = []

        def transform(columns: Columns) -> Columns:
            seen.append(columns["id"].tolist())
            return columns

        job = work(Chunked(1000, 1000, 1000), plan, first, last, transform)
        blocks = [transformed(transform, piece) for piece in in_order_of_use(job, {0: units(job, 0)})]
        assert sum(len(block.rows) for block in blocks) == (last - first) * 10
        return seen

    whole = pieces(0, 300)
    for first, last in ((1, 2), (37, 120), (201, 300), (299, 300)):
        part = pieces(first, last)
        start = whole.index(part[0])
        assert whole[start : start + len(part)] == part


def test_blocks_hold_the_rows_whose_numbers_they_carry() -> None:
    plan = Plan(700, None, 7, 2, seed=3)
    job = work(arrays(id=np.arange(700)), plan, 3, 80, lambda c: {"twice": c["id"] * 2}, held=(0, 1))
    for piece in in_order_of_use(job, {logical: units(job, logical) for logical in job.held}):
        block = transformed(job.transform, piece)
        assert len(block.rows) == piece.num_wanted
        assert (block.columns["twice"] == block.rows * 2).all()
