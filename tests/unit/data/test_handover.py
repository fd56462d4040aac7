from __future__ import annotations

import itertools
import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raytrain.data.handover import LEAD_ROWS, LEAD_S, Handover
from raytrain.data.reading import Columns, Piece, Unit, Work, pieces
from raytrain.plan.order import Plan


class Numbered:
    """Rows whose only column is their number."""

    columns = ("id",)

    def __init__(self, *chunk_rows: int) -> None:
        self.chunk_rows, self.num_rows = chunk_rows, sum(chunk_rows)

    def take(self, rows: NDArray[np.int64]) -> Columns:
        return {"id": rows.copy()}

    def fingerprint(self) -> dict[str, object]:
        return {}


def work_of(plan: Plan, held: tuple[int, ...], first: int, last: int) -> Work:
    return Work(Numbered(*plan.chunk_rows or ()), plan, None, held, first, last)


def places(made: list[Piece], logical: int) -> list[int]:
    blocks = [piece.block.part(piece.wanted) for piece in made if piece.block.logical == logical]
    return [block.place + i for block in blocks for i in range(len(block.rows))]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=20),
    st.integers(1, 3),
    st.integers(20, 300),
    st.integers(0, 30),
    st.integers(0, 50),
    st.integers(1, 4),
)
def test_r1_each_unit_is_read_directly_or_by_ray_data_whenever_it_takes_over(
    chunks: list[int], num_logical: int, batch: int, first: int, read_before: int, window: int
) -> None:
    plan = Plan(sum(chunks), tuple(chunks), batch, num_logical, shuffle_window=window)
    held = tuple(range(num_logical))
    work = work_of(plan, held, first, first + 2 * plan.steps_per_epoch)
    handover = Handover(work)
    direct = handover.pieces()
    made = list(itertools.islice(direct, read_before))
    later = [piece for unit in handover.agree() for piece in pieces(work, unit)]
    made += direct
    for logical in held:
        found = places(made, logical) + places(later, logical)
        place = work.first_place(logical)
        assert found == list(range(place, place + sum(plan.share(s, logical) for s in range(first, work.last_step))))


def lead_of(read_rows: int, elapsed_s: float) -> int:
    """Rows from what was read directly to what Ray Data reads, when it runs after some seconds."""
    plan = Plan(10**6, (100,) * 10**4, 100, 1, shuffle_window=1)
    now = [0.0]
    handover = Handover(work_of(plan, (0,), 0, 10**4), clock=lambda: now[0])
    direct = handover.pieces()
    for _ in range(read_rows // 100):
        next(direct)
    now[0] = elapsed_s
    first: Unit = next(handover.agree())
    return first.epoch * plan.num_rows + first.begin - read_rows


def test_direct_reading_goes_on_for_as_long_as_ray_data_takes_to_deliver_at_the_pace_so_far() -> None:
    assert 0 <= lead_of(50_000, 10.0) - 5000 * LEAD_S <= 200
    assert 0 <= lead_of(1000, 0.5) - 2000 * LEAD_S <= 200
    assert 0 <= lead_of(100, 10.0) - LEAD_ROWS <= 200


def test_direct_reading_does_not_end_before_ray_data_runs() -> None:
    plan = Plan(100_000, (100,) * 1000, 100, 1, shuffle_window=1)
    handover = Handover(work_of(plan, (0,), 0, 1000))
    assert sum(piece.num_wanted for piece in handover.pieces()) == 100_000
    assert list(handover.agree()) == []


def test_two_threads_share_the_units_without_loss() -> None:
    plan = Plan(10_000, (10,) * 1000, 100, 2, shuffle_window=1)
    for _ in range(3):
        work = work_of(plan, (0, 1), 0, 200)
        handover = Handover(work)
        later: list[Unit] = []
        begun = threading.Event()

        def agree(handover: Handover = handover, later: list[Unit] = later, begun: threading.Event = begun) -> None:
            begun.wait(10)
            later += handover.agree()

        thread = threading.Thread(target=agree)
        thread.start()
        rows = 0
        for piece in handover.pieces():
            begun.set()
            rows += piece.num_wanted
        thread.join()
        assert rows + sum(unit.end - unit.begin for unit in later) == 20_000
