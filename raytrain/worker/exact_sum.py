"""Sums of gradients that do not depend on their order, and so not on the number of workers, not even in the last bit.

Floating-point sums depend on their order; sums of integers do not. Each logical worker's gradient is multiplied by a power
of two, rounded to a 64-bit integer, and added up, on each rank and then over the ranks. The power of two is chosen for
each parameter from the largest gradient of the step before, which a maximum finds in any order. So nothing has to be kept
until all gradients are known: 8 bytes per parameter, whatever the number of logical workers. A gradient that has grown too
much for its power of two is noticed by all ranks at once, and the step's passes are done again under a fitting one.

No overflow is possible. With L logical workers, `fits` lets no rounded value exceed 2^(62 - ceil(log2 L)), and so the sum of
L of them, in any order and any grouping, does not exceed 2^62 < 2^63 - 1. Values that do not fit are never used. The
multiplication moves an exponent and loses nothing; the rounding of a value takes at most L * 2^-53 of the largest gradient
of the step before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

VALUE_BITS = 62
GROWTH_BITS = 8
"""A largest gradient may be 2^8 times that of the step before until passes are done again."""
UNKNOWN = -(2**15)
"""The exponent of a parameter that has had no gradient but zero yet."""
BUCKET_ELEMENTS = 4 << 20
"""Integers that are summed over the ranks in one piece: 32 MiB."""

LARGEST_FACTOR = 126
"""Two to this power is a float32; larger factors are applied in two steps."""
LARGEST_EXPONENT = 1000
"""Two to this power, and to minus it, is a float64. No exponent for float32 comes near it."""


def room_bits(num_logical: int) -> int:
    """Bits of one rounded value, so that as many of them as there are logical workers have a sum of `VALUE_BITS` bits."""
    return VALUE_BITS - (num_logical - 1).bit_length()


def fits(largest: float, exponent: int, num_logical: int) -> bool:
    """Whether a gradient of that size can be summed under that exponent."""
    if largest == 0:
        return True
    return exponent != UNKNOWN and math.frexp(largest)[1] + exponent <= room_bits(num_logical)


def exponent_for(largest: float, num_logical: int) -> int:
    """The exponent under which gradients 2^`GROWTH_BITS` times as large as `largest` still fit; `largest` > 0, finite."""
    return min(room_bits(num_logical) - GROWTH_BITS - math.frexp(largest)[1], LARGEST_EXPONENT)


class ExactSum:
    """The sum of the gradients of one step over all logical workers.

    Args:
        parameters: those that are trained.
        num_logical: logical workers of the run.
        exponents: one per parameter, after the step before; the same on all ranks.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], num_logical: int, exponents: Sequence[int]) -> None:
        self._parameters, self._num_logical = list(parameters), num_logical
        self.exponents = list(exponents)
        sizes = [parameter.numel() for parameter in self._parameters]
        device = self._parameters[0].device
        self._flat = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        parts = torch.split(self._flat, sizes)
        self._sums = [part.view_as(parameter) for part, parameter in zip(parts, self._parameters, strict=True)]
        self._largest = torch.zeros(len(sizes), dtype=torch.float64, device=device)
        self._present = torch.zeros_like(self._largest)

    def begin(self) -> None:
        """The passes of a step begin."""
        self._flat.zero_()
        self._largest.zero_()
        self._present.zero_()
        first = [
            0.0 if exponent == UNKNOWN else math.ldexp(1.0, min(exponent, LARGEST_FACTOR)) for exponent in self.exponents
        ]
        rest = [math.ldexp(1.0, max(0, exponent - LARGEST_FACTOR)) for exponent in self.exponents]
        self._factors = [first, rest] if any(factor != 1.0 for factor in rest) else [first]

    @torch.no_grad()
    def collect(self) -> None:
        """Takes the gradients that the passes of one logical worker have left in the parameters."""
        taken = {n: _multipliable(p.grad) for n, p in enumerate(self._parameters) if p.grad is not None}
        if not taken:
            return
        for parameter in self._parameters:
            parameter.grad = None
        own, gradients = list(taken), list(taken.values())
        places = torch.tensor(own, device=self._flat.device)
        self._largest[places] = torch.maximum(self._largest[places], _sizes(gradients))
        self._present[places] = 1.0
        for factors in self._factors:
            torch._foreach_mul_(gradients, [factors[number] for number in own])
        torch._foreach_round_(gradients)
        torch._foreach_add_([self._sums[number] for number in own], [gradient.to(torch.int64) for gradient in gradients])

    @torch.no_grad()
    def reduce(self) -> bool:
        """Sums over the ranks.

        Returns:
            True: the sums are the parameters' gradients now, and `exponents` those for the next step. False: the passes
            are to be done again, under exponents that fit them.
        """
        facts = torch.stack([self._largest.nan_to_num(nan=math.inf, posinf=math.inf), self._present])
        reductions = [dist.all_reduce(facts, op=dist.ReduceOp.MAX, async_op=True)]
        reductions += [dist.all_reduce(piece, async_op=True) for piece in torch.split(self._flat, BUCKET_ELEMENTS)]
        for reduction in reductions:
            reduction.wait()
        largest, present = facts.tolist()
        is_finite = all(map(math.isfinite, largest))
        misfits = [
            number for number, size in enumerate(largest) if not fits(size, self.exponents[number], self._num_logical)
        ]
        if is_finite and misfits:
            self._choose(misfits, largest)
            return False
        self._give(present, is_finite)
        if is_finite:
            self._choose([number for number, size in enumerate(largest) if size > 0], largest)
        return True

    def _give(self, present: list[float], is_finite: bool) -> None:
        for number, parameter in enumerate(self._parameters):
            if not present[number]:
                continue  # as in plain PyTorch: the optimizer leaves it alone
            if not is_finite:
                parameter.grad = torch.full_like(parameter, math.nan)
                continue
            exponent = self.exponents[number]
            total = self._sums[number].double()
            parameter.grad = total.mul_(math.ldexp(1.0, -exponent) if exponent != UNKNOWN else 0.0).to(parameter.dtype)

    def _choose(self, numbers: list[int], largest: list[float]) -> None:
        for number in numbers:
            self.exponents[number] = exponent_for(largest[number], self._num_logical)


def _multipliable(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in a form in which it can be multiplied by a large number."""
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.float() if dense.dtype in (torch.bfloat16, torch.float16) else dense


def _sizes(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude in each gradient, in float64; NaN where there is one."""
    filled = [gradient if gradient.numel() else gradient.new_zeros(1) for gradient in gradients]
    if filled[0].is_cuda:
        return torch.stack([norm.double() for norm in torch._foreach_norm(filled, math.inf)])
    ends = [torch.aminmax(gradient) for gradient in filled]  # on a CPU in a twentieth of the norm's time
    return torch.stack([torch.maximum(-low, high).double() for low, high in ends])
