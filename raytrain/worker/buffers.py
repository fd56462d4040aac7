"""Buffers that a forward pass updates (BatchNorm statistics), made independent of the number of ranks.

Every logical worker starts from the values at the beginning of the step, and what comes out is averaged over the logical
workers that had rows. Only saved buffers take part; integer ones (num_batches_tracked) take the largest value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from raytrain.worker.group import Group

_COUNTERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class StepBuffers:
    """The buffers of one model during one step; `begin` starts the next.

    Args:
        model: whose buffers they are.
        places: 1, or the number of logical workers: each has a place of its own then, and all are added up in their order, a
            sum of floats that does not depend on the ranks, at so many times the memory.
    """

    def __init__(self, model: torch.nn.Module, places: int = 1) -> None:
        self._places = places
        saved = model.state_dict(keep_vars=True)
        buffers = [buffer for name, buffer in model.named_buffers() if name in saved]
        self._averaged = [b for b in buffers if b.is_floating_point()]
        self._counters = [b for b in buffers if b.dtype in _COUNTERS]
        self._start: list[torch.Tensor] = []

    def begin(self) -> None:
        self._start = [b.detach().clone() for b in self._all]
        self._sums = [b.new_zeros((self._places, *b.shape), dtype=torch.float64) for b in self._averaged]
        self._largest = [c.detach().clone() for c in self._counters]
        self._num_collected = 0

    def rewind(self) -> None:
        """Puts the values of the step's beginning back into the model."""
        _assign(self._all, self._start)

    def collect(self, logical: int) -> None:
        """Takes note of what a logical worker's passes made of them."""
        for sums, buffer in zip(self._sums, self._averaged, strict=True):
            sums[logical % self._places] += buffer.detach()
        for largest, counter in zip(self._largest, self._counters, strict=True):
            torch.maximum(largest, counter, out=largest)
        self._num_collected += 1

    def reduced(self, group: Group) -> list[torch.Tensor]:
        """Their values after the step, over all ranks; for `assign`."""
        if not self._all:
            return []
        count = torch.tensor([float(self._num_collected)], dtype=torch.float64, device=group.device)
        flat = group.sum(torch.cat([count, *(sums.reshape(-1) for sums in self._sums)]))
        parts = torch.split(flat[1:], [sums.numel() for sums in self._sums])
        totals = [part.view_as(sums).sum(0) for part, sums in zip(parts, self._sums, strict=True)]
        for largest in self._largest:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        means = [(total / flat[0]).to(buffer.dtype) for total, buffer in zip(totals, self._averaged, strict=True)]
        return [*means, *self._largest]

    def assign(self, values: Sequence[torch.Tensor]) -> None:
        _assign(self._all, values)

    @property
    def _all(self) -> list[torch.Tensor]:
        return [*self._averaged, *self._counters]


def _assign(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
