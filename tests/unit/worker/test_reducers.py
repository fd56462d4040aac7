"""Buffers after a step are the average over logical workers, computed here by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raytrain.worker.group import Group
from raytrain.worker.reducers import BufferReducer


def by_hand(batch: torch.Tensor, momentum: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """Running mean and variance of a fresh BatchNorm after one batch, shapes [features]."""
    return momentum * batch.mean(0), (1 - momentum) + momentum * batch.var(0, unbiased=True)


@pytest.mark.parametrize("num_terms", [1, 2])
def test_batch_norm_statistics_are_averaged_over_logical_workers(group: Group, num_terms: int) -> None:
    norm = nn.BatchNorm1d(3).double()
    shares = [torch.randn(rows, 3, dtype=torch.float64) * 3 + 1 for rows in (5, 4)]
    buffers = BufferReducer(norm, num_terms)
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
    buffers = BufferReducer(norm)
    for _ in range(3):
        buffers.begin()
        buffers.rewind()
        for micro in (torch.randn(4, 2), torch.randn(3, 2)):
            norm(micro)
            plain(micro)
        buffers.collect(0)
        buffers.assign(buffers.reduce(group))
    torch.testing.assert_close(norm.state_dict(), plain.state_dict())


def test_buffers_that_are_not_saved_are_left_alone(group: Group) -> None:
    model = nn.Module()
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    model.register_buffer("mean", torch.zeros(2))
    buffers = BufferReducer(model)
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
    buffers = BufferReducer(model)
    buffers.begin()
    for value in (1.0, 2.0):
        model.mean.fill_(value)
        buffers.collect(0)
    (mean,) = buffers.reduce(group)
    assert mean.dtype == torch.bfloat16
    assert mean.tolist() == [1.5, 1.5]


def test_a_model_without_buffers_costs_nothing(group: Group) -> None:
    buffers = BufferReducer(nn.Linear(2, 2))
    buffers.begin()
    buffers.collect(0)
    group.all_reduce_async = None  # type: ignore[assignment, method-assign]
    assert buffers.reduce(group) == []
