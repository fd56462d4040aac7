"""Which bits does a state have? One digest per tensor of the weights and of the optimizer, and one over them all.

Equal digests mean equal bits, on whatever device, in whatever memory layout and order of keys. Where they are due is the
boundary's business; whether peers agree is asked in `state`, by sums that are quicker. In the worker; only reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from raytrain.events.kinds import StateDigest
from raytrain.worker.state import TrainState

SHOWN_DIGITS = 16


def state_digest(state: TrainState) -> StateDigest:
    """The digests of a state, as the event that is told."""
    tensors = tensor_digests(state.model, state.optimizer)
    return StateDigest(step=state.step, digest=whole_digest(tensors), tensors=tensors)


def tensor_digests(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """The first 16 hexadecimal digits of a SHA-256 for each entry of the model's `state_dict`, then for each of the
    optimizer's slots, both in the model's order.

    A slot's name is that of its parameter and its own: "0.weight.exp_avg". Parameters that the optimizer has and the model
    has not are called "param_groups.<group>.<position>". Holds a host copy of one tensor at a time.
    """
    entries = {**model.state_dict(), **dict(_slots(model, optimizer))}
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
    return sha256.hexdigest()[:SHOWN_DIGITS]


def _slots(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            names.setdefault(parameter, f"param_groups.{number}.{position}")
    for parameter, name in names.items():
        slots = optimizer.state.get(parameter, {})  # not by index: that would add an entry
        yield from ((f"{name}.{slot}", value) for slot, value in slots.items())
    yield from ((f"optimizer.{key}", value) for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor))


def _parts(value: object) -> Iterator[bytes | memoryview]:
    """What goes into the digest of a value: it says where each part ends, so that no two values look alike."""
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
