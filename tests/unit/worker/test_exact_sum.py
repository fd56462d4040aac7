"""Sums of gradients: the same bits in every order and grouping, never an overflow, close to the mathematical sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain.worker import exact_sum as module
from raytrain.worker.exact_sum import GROWTH_BITS, UNKNOWN, ExactSum, exponent_for, fits, room_bits

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
"""Of all magnitudes: subnormal ones, the largest ones, zeros of both signs."""


class Ranks:
    """Several sums as the ranks of one group: what one of them reduces is reduced with what the others have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.others: list[ExactSum] = []
        monkeypatch.setattr(dist, "all_reduce", self._reduce)

    def _reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, async_op: bool = False) -> Any:
        for other in self.others:
            if op == dist.ReduceOp.MAX:
                theirs = torch.stack([other._largest.nan_to_num(nan=math.inf, posinf=math.inf), other._present])
                torch.maximum(tensor, theirs, out=tensor)
            else:
                tensor += other._flat
        return self

    def wait(self) -> None:
        return None


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def total(
    ranks: Ranks, groups: Sequence[Sequence[float]], num_logical: int, exponent: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor | None, int, int]:
    """The sum of scalar gradients on several ranks, the exponent for the next step, and how often passes happened."""
    sums = []
    for _ in groups:
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
        sums.append(ExactSum([parameter], num_logical, [exponent]))
    for attempt in range(1, 3):
        for one, gradients in zip(sums, groups, strict=True):
            one.begin()
            for gradient in gradients:
                one._parameters[0].grad = torch.tensor([gradient], dtype=dtype)
                one.collect()
        ranks.others = sums[1:]
        if sums[0].reduce():
            return sums[0]._parameters[0].grad, sums[0].exponents[0], attempt
        for one in sums[1:]:
            one.exponents = list(sums[0].exponents)
    raise AssertionError("passes under a fitting exponent were not enough")


def dealt(values: Sequence[float], cuts: Sequence[int]) -> list[Sequence[float]]:
    """The values in consecutive groups."""
    edges = [0, *sorted(cut % (len(values) + 1) for cut in cuts), len(values)]
    return [values[start:end] for start, end in pairwise(edges)]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_bits_of_a_sum_do_not_depend_on_order_or_grouping(data: st.DataObject) -> None:
    values = data.draw(st.lists(FLOATS, min_size=1, max_size=9))
    exponent = data.draw(st.one_of(st.just(UNKNOWN), st.integers(-120, 220)))
    shuffled = data.draw(st.permutations(values))
    cuts = data.draw(st.lists(st.integers(0, 9), max_size=4))
    with pytest.MonkeyPatch.context() as patch:
        ranks = Ranks(patch)
        one = total(ranks, [values], len(values), exponent)
        other = total(ranks, dealt(shuffled, cuts), len(values), exponent)
    assert one[0] is not None
    assert other[0] is not None
    assert one[0].view(torch.int32).item() == other[0].view(torch.int32).item()
    assert one[1:] == other[1:]


@settings(max_examples=300, deadline=None)
@given(values=st.lists(FLOATS, min_size=1, max_size=9), exponent=st.integers(-120, 220))
def test_no_partial_sum_overflows_in_any_order(values: list[float], exponent: int) -> None:
    largest = max(map(abs, values))
    if not fits(largest, exponent, len(values)):
        exponent = exponent_for(largest, len(values))
    assert fits(largest, exponent, len(values))
    rounded = [round(Fraction(value) * Fraction(2) ** exponent) for value in values]
    assert sum(map(abs, rounded)) <= 2**62, "an upper bound for all partial sums of all orders"


@settings(max_examples=300, deadline=None)
@given(values=st.lists(FLOATS, min_size=1, max_size=9), growth=st.floats(1 / 256, 200))
def test_a_sum_is_close_to_the_mathematical_one(values: list[float], growth: float) -> None:
    largest = max(map(abs, values))
    exponent = exponent_for(largest / growth, len(values)) if largest / growth else UNKNOWN
    with pytest.MonkeyPatch.context() as patch:
        gradient, *_ = total(Ranks(patch), [values], len(values), exponent)
    expected = sum(map(Fraction, values), Fraction(0))
    assert gradient is not None
    if abs(expected) >= Fraction(2) ** 128 - Fraction(2) ** 103:
        assert not gradient.isfinite() or abs(gradient.item()) > 3e38
        return
    rounding = max(abs(float(expected)) * 2.0**-24, 2.0**-150)
    assert abs(Fraction(gradient.item()) - expected) <= Fraction(rounding) + 16 * Fraction(largest) * Fraction(2) ** -44


def test_a_gradient_that_grew_too_much_is_noticed_and_its_exponent_fits_it(ranks: Ranks) -> None:
    _, exponent, num_passes = total(ranks, [[1.0, -0.5]], 2, UNKNOWN)
    assert num_passes == 2, "nothing is known of the first gradient"
    for growth, expected in ((2.0 ** (GROWTH_BITS - 1), 1), (2.0 ** (GROWTH_BITS + 1), 2)):
        gradient, _, num_passes = total(ranks, [[growth, -0.5]], 2, exponent)
        assert num_passes == expected
        assert gradient is not None
        assert gradient.item() == growth - 0.5


def test_zero_gradients_leave_the_exponent_and_count_as_gradients(ranks: Ranks) -> None:
    gradient, exponent, num_passes = total(ranks, [[0.0], [-0.0]], 2, 20)
    assert gradient is not None
    assert (gradient.item(), exponent, num_passes) == (0.0, 20, 1)
    gradient, exponent, num_passes = total(ranks, [[0.0]], 1, UNKNOWN)
    assert gradient is not None
    assert (gradient.item(), exponent, num_passes) == (0.0, UNKNOWN, 1)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_the_sum_not_finite_on_all_ranks_and_leaves_the_exponent(ranks: Ranks, odd: float) -> None:
    gradient, exponent, num_passes = total(ranks, [[1.0], [odd]], 2, 20)
    assert gradient is not None
    assert not gradient.isfinite().any()
    assert (exponent, num_passes) == (20, 1)


def test_a_parameter_that_no_rank_used_has_no_gradient_and_one_that_some_used_has_one(ranks: Ranks) -> None:
    def used(*numbers: int) -> ExactSum:
        one = ExactSum([torch.nn.Parameter(torch.zeros(2)) for _ in range(3)], 2, [10, 10, 10])
        one.begin()
        for number in numbers:
            one._parameters[number].grad = torch.ones(2)
        one.collect()
        return one

    mine, theirs = used(0), used(1)
    ranks.others = [theirs]
    assert mine.reduce()
    gradients = [parameter.grad for parameter in mine._parameters]
    assert gradients[2] is None
    torch.testing.assert_close(gradients[0], torch.ones(2))
    torch.testing.assert_close(gradients[1], torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_gradients_of_other_types_keep_their_type(ranks: Ranks, dtype: torch.dtype) -> None:
    values = [[0.1, 0.25], [-0.375]]
    gradient, *_ = total(ranks, values, 3, UNKNOWN, dtype)
    other, *_ = total(ranks, [[-0.375, 0.25, 0.1]], 3, UNKNOWN, dtype)
    assert gradient is not None
    assert gradient.dtype == dtype
    assert torch.equal(gradient, other)  # type: ignore[arg-type]
    assert gradient.item() == pytest.approx(-0.025, rel=1e-2)


def test_parameters_without_elements_and_of_several_types_are_summed_like_any_others(ranks: Ranks) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(0, 3)), torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    one = ExactSum(parameters, 1, [10, 10])
    one.begin()
    for parameter in one._parameters:
        parameter.grad = torch.ones_like(parameter)
    one.collect()
    assert one.reduce()
    assert [parameter.grad.shape for parameter in one._parameters if parameter.grad is not None] == [(0, 3), (2,)]


def test_a_sum_in_several_pieces_is_the_same(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def result() -> torch.Tensor:
        torch.manual_seed(3)
        one = ExactSum([torch.nn.Parameter(torch.zeros(5, 3)), torch.nn.Parameter(torch.zeros(7))], 2, [30, 31])
        one.begin()
        for _ in range(2):
            for parameter in one._parameters:
                parameter.grad = torch.randn_like(parameter)
            one.collect()
        assert one.reduce()
        return torch.cat([parameter.grad.reshape(-1) for parameter in one._parameters if parameter.grad is not None])

    whole = result()
    monkeypatch.setattr(module, "BUCKET_ELEMENTS", 4)
    assert torch.equal(result(), whole)


def test_there_is_room_for_the_sum_of_all_logical_workers() -> None:
    for num_logical in (1, 2, 3, 4, 5, 64, 1000, 4096):
        assert num_logical * 2 ** room_bits(num_logical) <= 2**62
