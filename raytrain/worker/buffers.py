"""What does a pass write into the model, and how does that become the same for any number of workers?

Weights change in the optimizer only. A buffer that a forward pass writes is one of three things, found out by
`find_written` in the warm-up: a statistic (a moving average, as in BatchNorm), averaged over the logical workers; a
counter, of which the largest value counts; or a value that does not depend on the rows (the vectors of spectral norm),
which all logical workers compute alike. A queue, a codebook, or a count of rows is none of them: it is refused before the
first step. Buffers that no pass writes are left alone, so that the task may change them between steps, where all workers
do the same: in a hook of the optimizer. Runs in the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from raytrain.checkpoint.state import bare_name
from raytrain.errors import ConfigError
from raytrain.worker.group import Group
from raytrain.worker.tensor_hash import as_bytes

Place = tuple[nn.Module, str]
"""A module, and the name of a parameter or buffer in it: a pass may put another tensor there."""

SHIFT = 0.5
"""Added to a buffer to see how much of its old value is left after a pass."""


def buffer_places(model: nn.Module) -> dict[str, Place]:
    """Where each buffer is, by its full name; also those that are not persistent."""
    places: dict[str, Place] = {}
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                places[bare_name(model, f"{prefix}.{key}" if prefix else key)] = (module, key)
    return places


def is_persistent(place: Place) -> bool:
    """Whether the buffer is in the model's `state_dict`; one that is not is a cache, unless the passes write it."""
    module, key = place
    return key not in module._non_persistent_buffers_set


def read(place: Place) -> Tensor:
    """The tensor that is there now."""
    module, key = place
    buffer = module._buffers[key]
    if buffer is None:
        raise ConfigError(f"buffer {key!r} of {type(module).__name__}", "None", "stays a tensor", "register a tensor")
    return buffer


def write(place: Place, value: Tensor) -> None:
    """Copies a value into the tensor that is there now, or puts the value there if the shape has changed."""
    module, key = place
    with torch.no_grad():
        if (buffer := read(place)).shape == value.shape:
            buffer.copy_(value)
        else:
            module._buffers[key] = value.clone()


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Resets all buffers to their values before the block."""
    places = list(buffer_places(model).values())
    before = [read(place).detach().clone() for place in places]
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            write(place, value)


class BufferReducer:
    """Reduces the buffers that passes write, over the logical workers of a step.

    Each logical worker starts from the values at the beginning of the step. Floats are averaged over the logical workers
    that had rows; of integers and booleans the largest value counts.

    Args:
        model: the model whose buffers they are.
        names: those that passes write; see `find_written`.
        num_terms: 1, or the number of logical workers: then each has a term of its own, and the terms are added in their
            order, a sum of floats that does not depend on the ranks, at `num_terms` times the memory.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], num_terms: int = 1) -> None:
        self._num_terms = num_terms
        places = buffer_places(model)
        written = [places[name] for name in names]
        self._averaged = [place for place in written if _is_inexact(read(place))]
        self._counters = [place for place in written if not _is_inexact(read(place))]
        self._all = [*self._averaged, *self._counters]
        self._start: list[Tensor] = []

    def begin(self) -> None:
        """Starts a step."""
        self._start = [read(place).detach().clone() for place in self._all]
        shapes = [_as_real(read(place)).shape for place in self._averaged]
        device = self._start[0].device if self._start else torch.device("cpu")
        self._sums = [torch.zeros((self._num_terms, *shape), dtype=torch.float64, device=device) for shape in shapes]
        self._largest = [read(place).detach().to(torch.int64) for place in self._counters]
        self._num_collected = 0

    def rewind(self) -> None:
        """Resets the model's buffers to the beginning of the step."""
        self.assign(self._start)

    def collect(self, logical: int) -> None:
        """Adds the values after the passes of a logical worker."""
        for sums, place in zip(self._sums, self._averaged, strict=True):
            sums[logical % self._num_terms] += _as_real(read(place).detach())
        values = [read(place).detach().to(torch.int64) for place in self._counters]
        self._largest = [torch.maximum(largest, value) for largest, value in zip(self._largest, values, strict=True)]
        self._num_collected += 1

    def reduce(self, group: Group) -> list[Tensor]:
        """Returns the values after the step, over all ranks, for `assign`."""
        if not self._all:
            return []
        count = torch.tensor([float(self._num_collected)], dtype=torch.float64, device=group.device)
        flat = torch.cat([count, *(sums.reshape(-1) for sums in self._sums)])
        group.all_reduce_async(flat).wait()
        parts = torch.split(flat[1:], [sums.numel() for sums in self._sums])
        totals = [part.view_as(sums).sum(0) for part, sums in zip(parts, self._sums, strict=True)]
        largest = torch.cat([value.reshape(-1) for value in self._largest]) if self._largest else None
        if largest is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        started = self._start[: len(self._averaged)]
        means = [_like(total / flat[0], start) for total, start in zip(totals, started, strict=True)]
        sizes = [value.numel() for value in self._largest]
        counters = torch.split(largest, sizes) if largest is not None else []
        counted = self._start[len(self._averaged) :]
        return [*means, *(value.view_as(start).to(start.dtype) for value, start in zip(counters, counted, strict=True))]

    def assign(self, values: Sequence[Tensor]) -> None:
        for place, value in zip(self._all, values, strict=True):
            write(place, value)


class WriteGuard:
    """Notices when the passes of a step write parameters, or buffers that those of the warm-up did not write.

    Such a change would differ between workers. Looks at the counters of in-place changes that autograd keeps, so a change
    through `.data` is not seen; the warm-up compares values.
    """

    def __init__(self, model: nn.Module, written: Sequence[str]) -> None:
        self._parameters = list(model.named_parameters())
        places = buffer_places(model).items()
        self._places = [(name, place) for name, place in places if name not in written and is_persistent(place)]
        self._before: list[tuple[str, Tensor, int, bool]] = []

    def begin(self) -> None:
        """The passes of a step begin."""
        self._before = [(name, tensor, tensor._version, tensor.requires_grad) for name, tensor in self._tensors()]

    def find_written(self) -> list[str]:
        """The names of what has been written since."""
        now = self._tensors()
        pairs = zip(self._before, now, strict=True)
        return [name for (name, before, version, _), (_, after) in pairs if after is not before or after._version != version]

    def find_frozen_or_unfrozen(self) -> list[str]:
        """The names of the parameters whose `requires_grad` has changed since."""
        return [name for name, tensor, _, was_trained in self._before if tensor.requires_grad != was_trained]

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [*self._parameters, *((name, read(place)) for name, place in self._places)]


RunPass = Callable[[slice], object]
"""Runs one seeded forward pass over some of the rows of a sample."""


def find_written(model: nn.Module, run_pass: RunPass, first: slice, other: slice) -> list[str]:
    """Finds the buffers that a pass writes, and checks that each is of a kind that any number of workers keeps.

    Leaves all buffers as they were.

    Args:
        model: in the modes in which it trains.
        run_pass: runs a pass.
        first, other: two different sets of rows; of other lengths, where there are enough.

    Returns:
        the names of those buffers, the same on all workers.

    Raises:
        ConfigError: a pass writes a parameter, or a buffer of another kind.
    """
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    places = buffer_places(model)
    start = {name: read(place).detach().clone() for name, place in places.items()}
    before = {name: (id(read(place)), read(place)._version) for name, place in places.items()}
    with unchanged_buffers(model):
        run_pass(first)
        ends = {name: read(place).detach().clone() for name, place in places.items()}
        touched = {name for name, place in places.items() if (id(read(place)), read(place)._version) != before[name]}
    if changed := [name for name, parameter in model.named_parameters() if not _is_equal(parameter, weights[name])]:
        rule = "weights change in the optimizer only, since each worker's passes see other rows"
        fix = "initialize them in model(), or change them in a hook of the optimizer (register_step_post_hook)"
        raise ConfigError("model, parameter " + ", ".join(changed[:3]), "written by the forward pass", rule, fix)
    written = [
        name
        for name, place in places.items()
        if (name in touched or not _is_equal(ends[name], start[name]))
        and (is_persistent(place) or ends[name].shape == start[name].shape)  # else a cache that grows with the rows
    ]
    for name in written:
        if not isinstance(places[name][0], _NormBase):
            _check_kind(model, name, ends[name], run_pass, first, other)
    return written


def _check_kind(model: nn.Module, name: str, end: Tensor, run_pass: RunPass, first: slice, other: slice) -> None:
    """Raises ConfigError if the buffer is neither independent of the rows nor a moving average."""
    place = buffer_places(model)[name]

    def after(rows: slice, shift: float = 0.0) -> Tensor:
        with unchanged_buffers(model):
            if shift:
                write(place, read(place) + shift)
            run_pass(rows)
            return read(place).detach().clone()

    if end.shape == read(place).shape:
        if first != other and _is_equal(after(other), end):
            return
        if _is_inexact(end) and _keeps_a_part((after(first, SHIFT) - end) / SHIFT):
            return
    rule = (
        "a buffer that the forward pass writes is a moving average of something that rows have, a counter of passes, or "
        "does not depend on the rows: each worker sees other rows, and an average of anything else means nothing"
    )
    fix = "update it in a hook of the optimizer (register_step_post_hook), which runs alike on all workers, or do without"
    raise ConfigError(f"model, buffer {name}", "written by the forward pass", rule, fix)


def _keeps_a_part(kept: Tensor) -> bool:
    """Whether the part of the old value that is left is the same number in ]0, 1[ for all elements."""
    part = _as_real(kept).double()
    part = part[..., 0] if kept.is_complex() else part
    middle = float(part.mean())
    return 0.0 < middle < 1.0 - 1e-6 and float((part - middle).abs().max()) < 1e-2 * min(middle, 1 - middle) + 1e-5


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _like(value: Tensor, model_of: Tensor) -> Tensor:
    """A float64 value in the type of another tensor."""
    return (torch.view_as_complex(value) if model_of.is_complex() else value).to(model_of.dtype)


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, so that NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(as_bytes(one), as_bytes(other))
