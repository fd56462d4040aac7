"""Bitwise mode: the same weights to the last bit for any number of workers, and how that is shown.

Floating-point sums depend on their order; sums of integers do not. Each logical worker's gradient is multiplied by a power
of two, rounded to a 64-bit integer and added up, on each rank and then over the ranks. The exponent is chosen per
parameter from the largest gradient of the previous step, so 8 bytes per parameter suffice for any number of logical
workers. If a gradient outgrows its exponent, all ranks notice and repeat the passes with a larger one.

No overflow is possible. With L logical workers, `fits` lets no rounded value exceed 2^(62 - ceil(log2 L)), so the sum of
L of them, in any order and grouping, does not exceed 2^62 < 2^63 - 1; values that do not fit are never used. The
multiplication changes an exponent and loses nothing; rounding a value loses at most L * 2^-53 of the largest gradient of
the previous step. The rest is deterministic kernels, and SHA-256 digests of the state. Runs in the training thread.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from raytrain.checkpoint.state import bare_entries, bare_name
from raytrain.errors import ConfigError
from raytrain.events.kinds import StateDigest, WorkerEnvironment

VALUE_BITS = 62
GROWTH_BITS = 8
"""The largest gradient may grow by 2^8 from one step to the next before the passes are repeated."""
UNKNOWN = -(2**15)
"""The exponent of a parameter that has had no gradient other than zero yet."""
BUCKET_ELEMENTS = 4 << 20
"""Integers per all-reduce: 32 MiB."""

LARGEST_FACTOR = 126
"""2^126 is a float32; larger factors are applied in two steps."""
LARGEST_EXPONENT = 1000
"""2^1000 and 2^-1000 are float64. No exponent for float32 gradients comes near it."""
DIGEST_DIGITS = 16

_NO_KERNEL = re.compile(r"([\w:.]+) does not have a deterministic implementation")


def room_bits(num_logical: int) -> int:
    """Bits of one rounded value, so that the sum over `num_logical` of them fits in `VALUE_BITS` bits."""
    return VALUE_BITS - (num_logical - 1).bit_length()


def fits(largest: float, exponent: int, num_logical: int) -> bool:
    """Whether gradients of this largest magnitude can be summed with this exponent."""
    if largest == 0:
        return True
    return exponent != UNKNOWN and math.frexp(largest)[1] + exponent <= room_bits(num_logical)


def exponent_for(largest: float, num_logical: int) -> int:
    """The exponent with which gradients 2^`GROWTH_BITS` times as large as `largest` (> 0, finite) still fit."""
    return min(room_bits(num_logical) - GROWTH_BITS - math.frexp(largest)[1], LARGEST_EXPONENT)


class ExactSum:
    """The sum of the gradients of one step over all logical workers.

    Args:
        parameters: those that are trained.
        num_logical: logical workers of the run.
        exponents: one per parameter, from the previous step; the same on all ranks.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], num_logical: int, exponents: Sequence[int]) -> None:
        self._parameters, self._num_logical = list(parameters), num_logical
        self.exponents = list(exponents)
        shapes = [_as_real(parameter).shape for parameter in self._parameters]
        sizes = [shape.numel() for shape in shapes]
        device = self._parameters[0].device
        self._flat = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        parts = torch.split(self._flat, sizes)
        self._sums = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._largest = torch.zeros(len(sizes), dtype=torch.float64, device=device)
        self._present = torch.zeros_like(self._largest)

    def begin(self) -> None:
        """Starts the passes of a step."""
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
        """Adds the gradients that the passes of one logical worker have left in the parameters, and clears them."""
        taken = {n: _multipliable(p.grad) for n, p in enumerate(self._parameters) if p.grad is not None}
        if not taken:
            return
        for parameter in self._parameters:
            parameter.grad = None
        numbers, gradients = list(taken), list(taken.values())
        indices = torch.tensor(numbers, device=self._flat.device)
        self._largest[indices] = torch.maximum(self._largest[indices], _magnitudes(gradients))
        self._present[indices] = 1.0
        for factors in self._factors:
            torch._foreach_mul_(gradients, [factors[number] for number in numbers])
        torch._foreach_round_(gradients)
        torch._foreach_add_([self._sums[number] for number in numbers], [gradient.to(torch.int64) for gradient in gradients])

    @torch.no_grad()
    def reduce(self, synchronize: Callable[[], None] = lambda: None) -> bool:
        """Sums over the ranks; `synchronize` waits for the device, with a limit.

        Returns:
            True: the parameters have the summed gradients, and `exponents` are those for the next step. False: the passes
            must be repeated, with exponents that fit.
        """
        extremes = torch.stack([self._largest.nan_to_num(nan=math.inf, posinf=math.inf), self._present])
        reductions = [dist.all_reduce(extremes, op=dist.ReduceOp.MAX, async_op=True)]
        reductions += [dist.all_reduce(piece, async_op=True) for piece in torch.split(self._flat, BUCKET_ELEMENTS)]
        for reduction in reductions:
            reduction.wait()
        synchronize()
        largest, present = extremes.tolist()
        is_finite = all(map(math.isfinite, largest))
        misfits = [
            number for number, size in enumerate(largest) if not fits(size, self.exponents[number], self._num_logical)
        ]
        if is_finite and misfits:
            self._set_exponents(misfits, largest)
            return False
        self._set_gradients(present, is_finite)
        if is_finite:
            self._set_exponents([number for number, size in enumerate(largest) if size > 0], largest)
        return True

    def _set_gradients(self, present: list[float], is_finite: bool) -> None:
        for number, parameter in enumerate(self._parameters):
            if not present[number]:
                continue  # as in plain PyTorch: the optimizer leaves it alone
            if not is_finite:
                parameter.grad = torch.full_like(parameter, math.nan)
                continue
            exponent = self.exponents[number]
            total = self._sums[number].double()
            total.mul_(math.ldexp(1.0, -exponent) if exponent != UNKNOWN else 0.0)
            parameter.grad = (torch.view_as_complex(total) if parameter.is_complex() else total).to(parameter.dtype)

    def _set_exponents(self, numbers: list[int], largest: list[float]) -> None:
        for number in numbers:
            self.exponents[number] = exponent_for(largest[number], self._num_logical)


def _multipliable(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in a format that can be multiplied by a large number."""
    real = _as_real(gradient)
    return real.float() if real.dtype in (torch.bfloat16, torch.float16) else real


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Real and imaginary parts of a complex tensor, in one more dimension."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _magnitudes(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude in each gradient, in float64; NaN where there is one."""
    filled = [gradient if gradient.numel() else gradient.new_zeros(1) for gradient in gradients]
    if filled[0].is_cuda:
        return torch.stack([norm.double() for norm in torch._foreach_norm(filled, math.inf)])
    ends = [torch.aminmax(gradient) for gradient in filled]  # on a CPU in a twentieth of the norm's time
    return torch.stack([torch.maximum(-low, high).double() for low, high in ends])


def use_deterministic_algorithms() -> None:
    """Restricts this process to deterministic kernels; call it before the first kernel."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def worker_environment(worker: str, device: torch.device) -> WorkerEnvironment:
    """What the last bits of this process' results depend on besides the code and the data."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {torch.backends.cpu.get_cpu_capability()}"
    return WorkerEnvironment(worker=worker, device=kind, torch=str(torch.__version__), threads=torch.get_num_threads())


@contextmanager
def deterministic_kernels_only() -> Iterator[None]:
    """Raises `ConfigError` for PyTorch's error about an operator without a deterministic kernel; all others pass."""
    try:
        yield
    except RuntimeError as error:
        found = _NO_KERNEL.search(str(error))
        if found is None:
            raise
        rule = f"the model uses deterministic kernels only, and {found[1]} has none on this device"
        fix = f"do without {found[1]}, or set run.exactness to default"
        raise ConfigError("run.exactness", "bitwise", rule, fix) from None


def state_digest(step: int, model: nn.Module, optimizer: Optimizer) -> StateDigest:
    """The digests of the state after `step` finished steps: equal ones mean equal bits, on any device and memory layout."""
    tensors = tensor_digests(model, optimizer)
    return StateDigest(step=step, digest=whole_digest(tensors), tensors=tensors)


def tensor_digests(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """The first 16 hexadecimal digits of a SHA-256 for each entry of the model's `state_dict`, then for each of the
    optimizer's slots, both in the model's order.

    A slot is named after its parameter: "0.weight.exp_avg". Parameters of the optimizer that are not the model's are named
    "param_groups.<group>.<position>". Holds a host copy of one tensor at a time.
    """
    entries = {**bare_entries(model), **dict(_slots(model, optimizer))}
    return {name: value_digest(value) for name, value in entries.items()}


def whole_digest(tensors: Mapping[str, str]) -> str:
    """SHA-256 over the lines "name digest", sorted, so that the order of keys does not count."""
    lines = sorted(f"{name} {digest}" for name, digest in tensors.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def value_digest(value: object) -> str:
    """The digest of a tensor (dtype, shape and bytes), or of a plain value, which may hold tensors."""
    sha256 = hashlib.sha256()
    for part in _parts(value):
        sha256.update(part)
    return sha256.hexdigest()[:DIGEST_DIGITS]


def _slots(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    names = {parameter: bare_name(model, name) for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            names.setdefault(parameter, f"param_groups.{number}.{position}")
    for parameter, name in names.items():
        slots = optimizer.state.get(parameter, {})  # not by index: that would add an entry
        yield from ((f"{name}.{slot}", value) for slot, value in slots.items())
    yield from ((f"optimizer.{key}", value) for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor))


def _parts(value: object) -> Iterator[bytes | memoryview]:
    """What goes into the digest of a value, with the length of each part, so that no two values look alike."""
    if isinstance(value, torch.Tensor):
        yield f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}\n".encode()
        yield _bytes_of(value)
    elif isinstance(value, Mapping):
        yield f"mapping of {len(value)}\n".encode()
        for key in sorted(value, key=repr):
            yield from _parts(key)
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} of {len(value)}\n".encode()
        for item in value:
            yield from _parts(item)
    else:
        plain = value.item() if isinstance(value, np.generic) else value  # as a checkpoint keeps it
        yield f"{type(plain).__name__} {plain!r}\n".encode()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor of any shape, in row-major order; on the host without a copy."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return memoryview(host.reshape(-1).view(torch.uint8).numpy().data)
