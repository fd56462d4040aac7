from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from raytrain.data.arrays import arrays
from raytrain.data.reading import Block, Columns, Piece, Work, pieces, units
from raytrain.data.transforming import transformed
from raytrain.errors import DataError
from raytrain.plan.order import Plan


def noisy(columns: Columns) -> Columns:
    """Numbers from the generators of numpy, Python and PyTorch."""
    num_rows = len(columns["id"])
    noise = np.random.rand(num_rows), [random.random() for _ in range(num_rows)], torch.rand(num_rows).numpy()
    return dict(zip("npt", noise, strict=True))


def read(plan: Plan, first: int, last: int) -> dict[int, list[float]]:
    """Random numbers by row, of the steps of logical worker 0."""
    work = Work(arrays(id=np.arange(plan.num_rows)), plan, noisy, (0,), first, last)
    blocks = [transformed(noisy, piece) for unit in units(work, 0) for piece in pieces(work, unit)]
    return {
        int(row): [float(block.columns[name][i]) for name in "npt"] for block in blocks for i, row in enumerate(block.rows)
    }


def test_r13_random_numbers_of_a_transform_follow_from_the_seed_and_the_rows_place_alone() -> None:
    plan = Plan(1000, None, 10, 1, seed=4)
    whole = read(plan, 0, 100)
    np.random.seed(99), random.seed(99), torch.manual_seed(99)
    assert read(plan, 0, 100) == whole
    part = read(plan, 37, 81)
    assert len(part) == 440
    assert part == {row: whole[row] for row in part}


def test_r13_random_numbers_of_a_transform_differ_between_pieces_epochs_and_seeds() -> None:
    plan = Plan(1000, None, 10, 1, seed=4)
    seen = [read(plan, 0, 100), read(plan, 100, 200), read(Plan(1000, None, 10, 1, seed=5), 0, 100)]
    for position in range(3):
        values = {numbers[position] for by_row in seen for numbers in by_row.values()}
        assert len(values) > 2900  # no piece has the numbers of another; a few of PyTorch's may be equal


def piece(num_rows: int) -> Piece:
    block = Block(0, 0, np.arange(num_rows), {"id": np.arange(num_rows)})
    return Piece(block, (0, 0, 0, 0), slice(0, num_rows))


def test_rows_that_are_not_wanted_are_transformed_too_and_left_out() -> None:
    whole = piece(10)
    block = transformed(lambda c: {"sum": c["id"] + c["id"].sum()}, Piece(whole.block, whole.seed, slice(3, 5)))
    assert block.place == 3
    assert block.rows.tolist() == [3, 4]
    assert block.columns["sum"].tolist() == [48, 49]


@pytest.mark.parametrize(
    ("transform", "parts"),
    [
        (lambda c: {"id": c["id"][:-1]}, ["9 rows", "it was given 10"]),
        (lambda c: c["id"], ["returned ndarray"]),
        (lambda c: {"name": np.array(["a"] * 10)}, ["column 'name'"]),
        (lambda c: {"one": 1}, ["column 'one'"]),
    ],
)
def test_what_a_transform_must_return(transform: Any, parts: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        transformed(transform, piece(10))
    assert all(part in str(caught.value) for part in ["transform", *parts])
