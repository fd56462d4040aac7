"""Buffers after a step are the average over logical workers, computed here by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raytrain.errors import ConfigError
from raytrain.worker.buffers import BufferReducer, find_written
from raytrain.worker.group import Group

NORM = ["running_mean", "running_var", "num_batches_tracked"]


def by_hand(batch: torch.Tensor, momentum: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """Running mean and variance of a fresh BatchNorm after one batch, shapes [features]."""
    return momentum * batch.mean(0), (1 - momentum) + momentum * batch.var(0, unbiased=True)


@pytest.mark.parametrize("num_terms", [1, 2])
def test_batch_norm_statistics_are_averaged_over_logical_workers(group: Group, num_terms: int) -> None:
    norm = nn.BatchNorm1d(3).double()
    shares = [torch.randn(rows, 3, dtype=torch.float64) * 3 + 1 for rows in (5, 4)]
    buffers = BufferReducer(norm, NORM, num_terms)
    buffers.begin()
    for logical, share in enumerate(shares):
        buffers.rewind()
        norm(share)
        buffers.collect(logical)
    values = buffers.reduce(group)
    buffers.rewind()
    torch.testing.assert_close(norm.running_mean, torch.zeros(3, dtype=torch.float64))
    assert norm.num_batches_tracked == 0
    buffers.assign(values)
    expected = [by_hand(share) for share in shares]
    torch.testing.assert_close(norm.running_mean, (expected[0][0] + expected[1][0]) / 2)
    torch.testing.assert_close(norm.running_var, (expected[0][1] + expected[1][1]) / 2)
    assert norm.num_batches_tracked == 1


def test_micro_batches_and_steps_follow_each_other_as_in_plain_torch(group: Group) -> None:
    norm, plain = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    buffers = BufferReducer(norm, NORM)
    for _ in range(3):
        buffers.begin()
        buffers.rewind()
        for micro in (torch.randn(4, 2), torch.randn(3, 2)):
            norm(micro)
            plain(micro)
        buffers.collect(0)
        buffers.assign(buffers.reduce(group))
    torch.testing.assert_close(norm.state_dict(), plain.state_dict())


def test_buffers_that_no_pass_writes_are_left_alone(group: Group) -> None:
    model = nn.Module()
    model.register_buffer("cache", torch.zeros(2))
    model.register_buffer("mean", torch.zeros(2))
    buffers = BufferReducer(model, ["mean"])
    buffers.begin()
    model.cache.fill_(1.0)
    model.mean.fill_(1.0)
    buffers.collect(0)
    buffers.rewind()
    assert model.cache.tolist() == [1.0, 1.0]
    assert model.mean.tolist() == [0.0, 0.0]


def test_values_of_half_precision_keep_their_type(group: Group) -> None:
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(2, dtype=torch.bfloat16))
    buffers = BufferReducer(model, ["mean"])
    buffers.begin()
    for value in (1.0, 2.0):
        model.mean.fill_(value)
        buffers.collect(0)
    (mean,) = buffers.reduce(group)
    assert mean.dtype == torch.bfloat16
    assert mean.tolist() == [1.5, 1.5]


def test_a_model_without_buffers_costs_nothing(group: Group) -> None:
    buffers = BufferReducer(nn.Linear(2, 2), [])
    buffers.begin()
    buffers.collect(0)
    group.all_reduce_async = None  # type: ignore[assignment, method-assign]
    assert buffers.reduce(group) == []


class Writing(nn.Module):
    """Writes its buffer as a function says."""

    def __init__(self, buffer: torch.Tensor, write: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("kept", buffer)
        self._write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._write(self.kept, x)
        return self.linear(x)


def push(queue: torch.Tensor, x: torch.Tensor) -> None:
    queue.copy_(torch.cat([queue[len(x) :], x[:, 0]]))


ACCEPTED: dict[str, tuple[torch.Tensor, Any]] = {
    "moving average": (torch.zeros(4), lambda b, x: b.mul_(0.9).add_(x.mean(0), alpha=0.1)),
    "moving average through .data": (torch.zeros(4), lambda b, x: b.data.lerp_(x.mean(0), 0.2)),
    "counter of passes": (torch.zeros((), dtype=torch.int64), lambda b, x: b.add_(1)),
    "flag": (torch.zeros((), dtype=torch.bool), lambda b, x: b.fill_(True)),
    "what no row changes": (torch.ones(4), lambda b, x: b.mul_(0.5).add_(1.0)),
}
REFUSED: dict[str, tuple[torch.Tensor, Any]] = {
    "queue": (torch.zeros(64), push),
    "counter of rows": (torch.zeros((), dtype=torch.int64), lambda b, x: b.add_(len(x))),
    "largest value": (torch.zeros(4), lambda b, x: b.copy_(torch.maximum(b, x.max(0).values))),
    "values of the last rows": (torch.zeros(4), lambda b, x: b.copy_(x[0])),
    "codebook": (torch.randn(4), lambda b, x: b.copy_((b * 0.9 + x.mean(0)) / (1 + b.abs()))),
}


def found_in(model: nn.Module) -> list[str]:
    rows = torch.randn(16, 4)
    return find_written(model, lambda part: model(rows[part]), slice(0, 8), slice(9, 16))


@pytest.mark.parametrize("kind", ACCEPTED)
def test_buffers_that_any_workers_can_keep_are_found_and_left_as_they_were(kind: str) -> None:
    buffer, write = ACCEPTED[kind]
    model = Writing(buffer.clone(), write)
    assert found_in(model) == ["kept"]
    assert torch.equal(model.kept, buffer)


@pytest.mark.parametrize("kind", REFUSED)
def test_buffers_that_depend_on_which_rows_a_worker_sees_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"buffer kept[\s\S]*register_step_post_hook"):
        found_in(Writing(*REFUSED[kind]))


def test_weights_that_a_forward_pass_writes_are_refused_by_name() -> None:
    model = Writing(torch.zeros(4), lambda b, x: model.linear.weight.data.copy_(x[:1]))
    with pytest.raises(ConfigError, match=r"parameter linear\.weight"):
        found_in(model)


def test_a_cache_that_grows_with_the_rows_is_left_alone() -> None:
    model = Writing(torch.zeros(4), lambda b, x: model.register_buffer("cache", torch.arange(len(x)), persistent=False))
    model.register_buffer("cache", torch.arange(2), persistent=False)
    assert found_in(model) == []
