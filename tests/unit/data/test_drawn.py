from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain.data.drawn import MixedSource, WeightedSource, interleaved, mix, strata_ends, weighted
from raytrain.data.in_memory import arrays, dataset
from raytrain.data.source import Source
from raytrain.errors import DataError
from tests.golden import check
from tests.unit.data.rows import Numbered


def epoch_of(source: Source, epoch: int, seed: int = 0) -> list[int]:
    return [int(row) for row in source.take(np.arange(source.num_rows), (seed, epoch))["id"]]


class Labelled(Numbered):
    """Rows with ids from `first` on."""

    def __init__(self, rows: Any, first: int) -> None:
        super().__init__(rows)
        self.first = first

    def take(self, row_ids: Any, seed: Any = (0, 0)) -> Any:
        return {"id": super().take(row_ids)["id"] + self.first}


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 60), st.floats(0.1, 10), st.booleans(), st.integers(1, 200))
def test_a_mix_uses_up_each_source_before_its_rows_come_again_over_epochs(
    small: int, large: int, share: float, in_chunks: bool, rows: int
) -> None:
    chunks = (large, 3, large)
    sources = [Labelled(small, 0), Labelled(chunks if in_chunks else sum(chunks), 1000)]
    mixed = mix([(sources[0], 1), (sources[1], share)], rows=rows)
    drawn = [row for epoch in range(4) for row in epoch_of(mixed, epoch, seed=5)]
    for source in sources:
        mine = [row - source.first for row in drawn if (row >= 1000) == (source.first == 1000)]
        for start in range(0, len(mine), source.num_rows):
            some = mine[start : start + source.num_rows]
            assert len(set(some)) == len(some)
            assert len(some) < source.num_rows or sorted(some) == list(range(source.num_rows))


def test_each_part_of_a_mix_has_the_shares_of_the_whole() -> None:
    mixed = mix({Labelled(500, 0): 3, Labelled((100,) * 9, 1000): 1}, rows=10_000)
    of_second = np.array(epoch_of(mixed, 2)) >= 1000
    assert of_second.sum() == 2500
    assert {int(part.sum()) for part in of_second.reshape(100, 100)} == {25}
    assert epoch_of(mixed, 2) != epoch_of(mixed, 3) != epoch_of(mixed, 3, seed=1)


def test_neighbours_of_a_mix_are_from_few_row_groups() -> None:
    source = Numbered((5000,) * 20)
    mixed = mix({arrays(id=np.arange(10)): 1, source: 4})
    for start in np.cumsum([0, *mixed.chunk_rows])[:-1].tolist():
        assert len(set(mixed.take(np.arange(start, start + mixed.chunk_rows[0] // 2))["id"] // 5000)) <= 3


@settings(max_examples=40)
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(0.01, 50)), min_size=1, max_size=60).filter(any),
    st.integers(1, 150),
    st.integers(0, 9),
)
def test_a_row_is_drawn_as_often_as_its_weight_says_rounded_up_or_down(weights: list[float], rows: int, epoch: int) -> None:
    source = weighted(arrays(id=np.arange(len(weights))), weights, rows=rows)
    drawn = Counter(epoch_of(source, epoch))
    for row, expected in enumerate(np.array(weights) / sum(weights) * rows):
        assert np.floor(expected - 1e-6) <= drawn[row] <= np.ceil(expected + 1e-6)
        assert weights[row] or not drawn[row]


def test_rows_of_row_groups_are_drawn_in_proportion_over_epochs() -> None:
    weights = np.arange(3000) % 7 * 0.1
    source = weighted(Numbered((1000, 1, 999, 1000)), weights)
    assert sum(source.chunk_rows or ()) == 3000
    drawn = sum((Counter(epoch_of(source, epoch)) for epoch in range(200)), Counter())
    for weight in range(7):
        share = sum(drawn[row] for row in range(3000) if row % 7 == weight) / 200 / 3000
        assert share == pytest.approx(
            weight * np.count_nonzero(np.arange(3000) % 7 == weight) * 0.1 / weights.sum(), abs=0.002
        )


def test_equal_weights_draw_each_row_once_and_a_column_gives_weights() -> None:
    ids = np.arange(999)
    assert epoch_of(weighted(arrays(id=ids), np.ones(999)), 3) == ids.tolist()
    source = weighted(arrays(id=ids, weight=(ids % 3 == 1).astype("f4")), "weight")
    assert {row % 3 for row in epoch_of(source, 0)} == {1}
    assert source.chunk_rows is None


class Noise:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"id": row, "noise": torch.rand(1)}


def test_r13_a_row_that_is_drawn_again_has_other_random_numbers_on_any_worker() -> None:
    source = weighted(dataset(Noise()), [1.0, 5.0, 0.0, 2.0], rows=16)
    whole = source.take(np.arange(16), (3, 1))
    assert len(set(whole["noise"].ravel().tolist())) == 16
    order = np.array([13, 2, 7, 3])
    part = pickle.loads(pickle.dumps(source)).take(order, (3, 1))
    assert (part["noise"] == whole["noise"][order]).all()
    assert (part["id"] == whole["id"][order]).all()
    assert source.take(order[:0])["noise"].shape == (0, 1)


@pytest.mark.parametrize(
    "source", [mix({Labelled(50, 0): 1, Labelled((9, 9), 100): 2}), weighted(Numbered((30, 9)), range(39))]
)
def test_which_rows_are_drawn_does_not_depend_on_what_is_read_together(source: MixedSource | WeightedSource) -> None:
    whole = np.array(epoch_of(source, 1, seed=7))
    other = pickle.loads(pickle.dumps(source))
    for rows in np.array_split(np.random.default_rng(0).permutation(source.num_rows), 5):
        assert other.take(rows, (7, 1))["id"].tolist() == whole[rows].tolist()


def test_a_pattern_has_each_source_evenly() -> None:
    assert interleaved(np.array([4, 1, 2])).tolist() == [0, 2, 0, 1, 0, 2, 0]


def test_row_groups_with_few_draws_are_drawn_from_together() -> None:
    assert strata_ends(np.array([5.0, 10, 20, 30, 31]), 9).tolist() == [2, 3, 5]
    assert strata_ends(np.array([1.0]), 9).tolist() == [1]


REFUSED = {
    "mix_one": lambda: mix({arrays(x=[1]): 1}),
    "mix_share": lambda: mix([(arrays(x=[1]), 1), (arrays(x=[2]), -0.5)]),
    "mix_columns": lambda: mix([(arrays(x=[1]), 1), (arrays(y=[2]), 1)]),
    "mix_types": lambda: mix([(arrays(x=[1]), 1), (arrays(x=[2.5]), 1)]),
    "mix_shapes": lambda: mix([(arrays(x=[[1]]), 1), (arrays(x=[[1, 2]]), 1)]),
    "mix_rows": lambda: mix([(arrays(x=[1]), 1), (arrays(x=[2]), 1)], rows=0),
    "mix_path": lambda: mix([("web/", 1), (arrays(x=[2]), 1)]),
    "weighted_column": lambda: weighted(arrays(label=[1], weight=[1]), "wieght"),
    "weighted_count": lambda: weighted(arrays(x=[1, 2]), [1.0]),
    "weighted_negative": lambda: weighted(arrays(x=[1, 2, 3]), [1, 2, -3]),
    "weighted_nan": lambda: weighted(arrays(x=[1, 2]), [1, float("nan")]),
    "weighted_zeros": lambda: weighted(arrays(x=[1, 2]), [0, 0]),
    "weighted_twice": lambda: weighted(weighted(arrays(x=[1]), [1]), [1]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_drawn_from_is_refused(case: str) -> None:
    with pytest.raises(DataError) as refused:
        REFUSED[case]()
    check(f"errors/{case}.txt", f"{refused.value}\n")
