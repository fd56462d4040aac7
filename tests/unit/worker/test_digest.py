"""Digests tell one flipped bit, and nothing else: no order, no layout, no way through a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raytrain.checkpoint.state import restore, snapshot
from raytrain.events.values import from_json, to_json
from raytrain.worker.digest import state_digest, tensor_digests, value_digest, whole_digest
from raytrain.worker.state import TrainState

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
    return TrainState(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10), step=0)


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


def test_each_tensor_of_the_state_has_its_name() -> None:
    names = list(state_digest(trained("adamw")).tensors)
    model = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    model += ["2.weight", "2.bias"]
    parameters = [name for name in model if name.endswith(("weight", "bias"))]
    assert names == model + [f"{name}.{slot}" for name in parameters for slot in ("step", "exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("slot", ["step", "exp_avg", "exp_avg_sq"])
def test_one_flipped_bit_in_one_slot_changes_the_digest_of_this_slot(slot: str) -> None:
    state = trained()
    before = state_digest(state)
    flip(state.optimizer.state[state.model[2].bias][slot])
    after = state_digest(state)
    assert [name for name in before.tensors if before.tensors[name] != after.tensors[name]] == [f"2.bias.{slot}"]
    assert before.digest != after.digest


def test_one_flipped_bit_in_a_weight_changes_the_digest_of_this_weight() -> None:
    state = trained()
    before = state_digest(state)
    flip(state.model[0].weight.detach())
    after = state_digest(state)
    assert [name for name in before.tensors if before.tensors[name] != after.tensors[name]] == ["0.weight"]


def test_taking_digests_leaves_the_state_as_it_was() -> None:
    state = made("momentum")
    first = state_digest(state)
    assert len(state.optimizer.state) == 0
    assert state_digest(state) == first


def test_the_order_of_keys_does_not_count() -> None:
    state = trained()
    tensors, digest = tensor_digests(state.model, state.optimizer), state_digest(state).digest
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


def test_a_lazy_conjugate_is_digested_as_its_values() -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    assert value_digest(values.conj()) == value_digest(values.conj().resolve_conj()) != value_digest(values)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_device_does_not_count() -> None:
    state = trained()
    for value in [*state.model.state_dict().values(), *state.optimizer.state[state.model[0].weight].values()]:
        assert value_digest(value) == value_digest(value.cuda())


def test_type_and_shape_count() -> None:
    zeros = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(2, dtype=torch.float64), torch.zeros(8, dtype=torch.bfloat16)]
    zeros += [torch.zeros(()), torch.zeros(0), torch.zeros(0, 3)]
    assert len({value_digest(value) for value in [*zeros, 0.0, 0, False, None, "0", [0], (0,), [0, 0], [[0], 0]]}) == 16


def test_plain_values_are_digested_as_a_checkpoint_keeps_them() -> None:
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
    event = state_digest(trained())
    assert (event.step, len(event.digest), {len(digest) for digest in event.tensors.values()}) == (3, 64, {16})
    assert from_json(to_json(event)) == event
