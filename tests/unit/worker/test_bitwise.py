"""Sums that do not depend on their order, and digests of the state."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from raytrain.checkpoint.state import restore, snapshot
from raytrain.events.kinds import StateDigest, from_json, to_json
from raytrain.worker import bitwise as module
from raytrain.worker.bitwise import (
    GROWTH_BITS,
    UNKNOWN,
    ExactSum,
    exponent_for,
    fits,
    room_bits,
    state_digest,
    tensor_digests,
    value_digest,
    whole_digest,
    worker_environment,
)
from raytrain.worker.lr_schedule import LRSchedule
from raytrain.worker.state import TrainState

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
@given(largest=FLOATS.map(abs), exponent=st.integers(-120, 220), num_logical=st.integers(1, 4096))
def test_no_partial_sum_overflows_in_any_order(largest: float, exponent: int, num_logical: int) -> None:
    if not fits(largest, exponent, num_logical):
        exponent = exponent_for(largest, num_logical)
    assert fits(largest, exponent, num_logical)
    rounded = round(Fraction(largest) * Fraction(2) ** exponent)
    assert num_logical * rounded <= 2**62, "an upper bound for all partial sums of all orders"


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
        assert (gradient, num_passes) == (growth - 0.5, expected)


@pytest.mark.parametrize("exponent", [20, UNKNOWN])
def test_zero_gradients_leave_the_exponent_and_count_as_gradients(ranks: Ranks, exponent: int) -> None:
    assert total(ranks, [[0.0], [-0.0]], 2, exponent) == (0.0, exponent, 1)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_on_all_ranks_and_leaves_the_exponent(ranks: Ranks, odd: float) -> None:
    gradient, exponent, num_passes = total(ranks, [[1.0], [odd]], 2, 20)
    assert gradient is not None
    assert not gradient.isfinite().any()
    assert (exponent, num_passes) == (20, 1)


def summed(*parameters: nn.Parameter, used: Sequence[int], num_passes: int = 1) -> ExactSum:
    """The passes of one rank, with random gradients for the parameters that it used."""
    one = ExactSum(parameters, 2, [30 + number for number in range(len(parameters))])
    one.begin()
    torch.manual_seed(3)
    for _ in range(num_passes):
        for number in used:
            parameters[number].grad = torch.randn_like(parameters[number])
        one.collect()
    return one


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


def test_a_parameter_has_a_gradient_if_any_rank_used_it(ranks: Ranks) -> None:
    mine = [zeros(2) for _ in range(3)]
    one = summed(*mine, used=[0])
    ranks.others = [summed(*[zeros(2) for _ in range(3)], used=[1])]
    assert one.reduce()
    assert mine[2].grad is None
    expected = torch.randn(2, generator=torch.Generator().manual_seed(3))
    for parameter in mine[:2]:
        torch.testing.assert_close(parameter.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_gradients_of_other_types_keep_their_type(ranks: Ranks, dtype: torch.dtype) -> None:
    gradient, *_ = total(ranks, [[0.1, 0.25], [-0.375]], 3, UNKNOWN, dtype)
    other, *_ = total(ranks, [[-0.375, 0.25, 0.1]], 3, UNKNOWN, dtype)
    assert gradient is not None
    assert gradient.dtype == dtype
    assert torch.equal(gradient, other)  # type: ignore[arg-type]
    assert gradient.item() == pytest.approx(-0.025, rel=1e-2)


def test_a_sum_in_pieces_is_the_same_for_any_shapes_and_types(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for elements in (module.BUCKET_ELEMENTS, 4):
        monkeypatch.setattr(module, "BUCKET_ELEMENTS", elements)
        parameters = [zeros(5, 3), zeros(0, 3), zeros(7, dtype=torch.float64)]
        assert summed(*parameters, used=[0, 1, 2], num_passes=2).reduce()
        results.append([parameter.grad for parameter in parameters])
    assert [gradient.shape for gradient in results[0] if gradient is not None] == [(5, 3), (0, 3), (7,)]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))  # type: ignore[arg-type]


def test_there_is_room_for_the_sum_of_all_logical_workers() -> None:
    for num_logical in (1, 2, 3, 4, 5, 64, 1000, 4096):
        assert num_logical * 2 ** room_bits(num_logical) <= 2**62


def test_a_process_without_torch_reads_what_a_worker_says_of_its_environment() -> None:
    event = worker_environment("w0", torch.device("cpu"))
    assert b"torch." not in pickle.dumps(event), "the version has a class of its own, which imports all of torch"


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
}


def made(kind: str = "adamw", seed: int = 0) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = OPTIMIZERS[kind](model.parameters())
    return TrainState(model, optimizer, LRSchedule(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)), step=0)


def trained(kind: str = "adamw", steps: int = 3) -> TrainState:
    state = made(kind)
    for step in range(steps):
        rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))

        def loss(rows: torch.Tensor = rows) -> Any:
            state.optimizer.zero_grad()
            total = state.model(rows).pow(2).sum()
            total.backward()
            return total

        state.optimizer.step(loss)
        state.scheduler.step()  # type: ignore[union-attr]
        state.step += 1
    return state


def digest_of(state: TrainState) -> StateDigest:
    return state_digest(state.step, state.model, state.optimizer)


def flip(tensor: torch.Tensor) -> None:
    """Changes the lowest bit of the last value."""
    tensor.view(-1).view(torch.uint8)[-tensor.element_size()] ^= 1


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_r9_a_state_keeps_its_digest_through_a_checkpoint(kind: str, steps: int) -> None:
    before, after = trained(kind, steps), made(kind, seed=1)
    files = snapshot(before.model, before.optimizer, before.scheduler, before.step).files()
    assert tensor_digests(before.model, before.optimizer) != tensor_digests(after.model, after.optimizer)
    restore(files, after.model, after.optimizer, after.scheduler)
    assert tensor_digests(before.model, before.optimizer) == tensor_digests(after.model, after.optimizer)


def test_each_tensor_of_the_state_has_its_name_and_a_digest_leaves_it_as_it_was() -> None:
    new = made()
    assert digest_of(new) == digest_of(new)
    assert len(new.optimizer.state) == 0
    names = list(digest_of(trained()).tensors)
    model = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    model += ["2.weight", "2.bias"]
    parameters = [name for name in model if name.endswith(("weight", "bias"))]
    assert names == model + [f"{name}.{slot}" for name in parameters for slot in ("step", "exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("changed", ["0.weight", "2.bias.step", "2.bias.exp_avg", "2.bias.exp_avg_sq"])
def test_one_flipped_bit_changes_the_digest_of_its_tensor_alone(changed: str) -> None:
    state = trained()
    before = digest_of(state)
    slots = state.optimizer.state[state.model[2].bias]
    flip(state.model[0].weight.detach() if changed == "0.weight" else slots[changed.removeprefix("2.bias.")])
    after = digest_of(state)
    assert [name for name in before.tensors if before.tensors[name] != after.tensors[name]] == [changed]
    assert before.digest != after.digest


def test_the_order_of_keys_does_not_count() -> None:
    state = trained()
    tensors, digest = tensor_digests(state.model, state.optimizer), digest_of(state).digest
    for parameter, slots in list(state.optimizer.state.items())[::-1]:
        del state.optimizer.state[parameter]
        state.optimizer.state[parameter] = dict(reversed(slots.items()))
    assert whole_digest(tensor_digests(state.model, state.optimizer)) == digest
    assert whole_digest(dict(reversed(tensors.items()))) == digest
    assert value_digest({"a": 1, "b": 2.0}) == value_digest({"b": 2.0, "a": 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_the_layout_in_memory_does_not_count(dtype: torch.dtype) -> None:
    values = torch.arange(24).reshape(4, 6).to(dtype)
    transposed, strided = values.t().contiguous().t(), values.repeat_interleave(2, 1)[:, ::2]
    assert not transposed.is_contiguous()
    assert not strided.is_contiguous()
    assert value_digest(values) == value_digest(transposed) == value_digest(strided)
    assert value_digest(values) != value_digest(values.t())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_device_does_not_count() -> None:
    state = trained()
    for value in [*state.model.state_dict().values(), *state.optimizer.state[state.model[0].weight].values()]:
        assert value_digest(value) == value_digest(value.cuda())


def test_type_and_shape_count() -> None:
    zeros = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(2, dtype=torch.float64), torch.zeros(8, dtype=torch.bfloat16)]
    zeros += [torch.zeros(()), torch.zeros(0), torch.zeros(0, 3)]
    assert len({value_digest(value) for value in [*zeros, 0.0, 0, False, None, "0", [0], (0,), [0, 0], [[0], 0]]}) == 16


def test_plain_values_and_lazy_conjugates_are_digested_as_a_checkpoint_keeps_them() -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    assert value_digest(values.conj()) == value_digest(values.conj().resolve_conj()) != value_digest(values)
    assert value_digest(np.float32(0.5)) == value_digest(0.5)
    assert value_digest([torch.ones(2), 1]) != value_digest([torch.zeros(2), 1])
    assert value_digest(float("nan")) == value_digest(float("nan"))


def test_a_digest_is_the_same_in_every_version() -> None:
    values = torch.tensor([[1.0, -2.0], [0.5, 0.0]])
    assert value_digest(values) == "6291c8858a28fade"  # SHA-256 of "float32 [2, 2]\n" and four little-endian floats
    assert whole_digest({"a": "1", "b": "2"}) == "4ef55c4d7168c5b14453c2bb63e3454be92d2faf69959a8ae5384deafb2dac4e"


def test_what_the_optimizer_has_besides_the_parameters_of_the_model_is_digested_too() -> None:
    state, own = trained("momentum"), nn.Parameter(torch.ones(2))
    state.optimizer.add_param_group({"params": [own]})
    own.grad = torch.ones(2)
    state.optimizer.step()
    state.optimizer.state["rounds"] = 3  # type: ignore[index]
    names = list(tensor_digests(state.model, state.optimizer))
    assert names[-2:] == ["param_groups.1.0.momentum_buffer", "optimizer.rounds"]


def test_the_event_survives_the_log() -> None:
    event = digest_of(trained())
    assert (event.step, len(event.digest), {len(digest) for digest in event.tensors.values()}) == (3, 64, {16})
    assert from_json(to_json(event)) == event
