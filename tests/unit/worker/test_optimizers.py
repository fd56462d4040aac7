"""Several optimizers as one, and optimizers that no distributed step can serve."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from raytrain.checkpoint.state import restore, snapshot
from raytrain.errors import ConfigError, ResumeError
from raytrain.worker.bitwise import tensor_digests
from raytrain.worker.optimizers import Optimizers, build_optimizer


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def both(model: nn.Sequential, first: Any = torch.optim.Adagrad) -> list[torch.optim.Optimizer]:
    last = [{"params": [model[1].weight]}, {"params": [model[1].bias], "weight_decay": 0.0}]
    return [first(model[0].parameters(), lr=0.1), torch.optim.AdamW(last, lr=0.01)]


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def train(model: nn.Sequential, optimizers: list[Any], schedulers: list[Any], first: int, last: int) -> None:
    for step in range(first, last):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.full((8, 4), step / 10)).square().mean().backward()
        for each in (*optimizers, *schedulers):
            each.step()


@pytest.mark.parametrize("done", [0, 4])
def test_r9_two_optimizers_train_as_by_hand_also_after_a_resume(done: int) -> None:
    expected = net()
    by_hand = both(expected)
    train(expected, by_hand, [cosine(each) for each in by_hand], 0, 8)
    model = net()
    optimizer = build_optimizer("Mine.optimizer", both(model))
    scheduler = cosine(optimizer)
    train(model, [optimizer], [scheduler], 0, done)
    taken = snapshot(model, optimizer, scheduler, done)

    resumed = net(seed=1)
    other = build_optimizer("Mine.optimizer", both(resumed))
    schedule = cosine(other)
    train(resumed, [other], [schedule], 0, 2)
    restore(taken.files(), resumed, other, schedule)
    assert snapshot(resumed, other, schedule, done).files() == taken.files()
    assert tensor_digests(resumed, other) == tensor_digests(model, optimizer)
    train(resumed, [other], [schedule], done, 8)
    for mine, theirs in zip(resumed.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert other.state[resumed[0].weight].keys() == {"step", "sum"}
    torch.load(io.BytesIO(taken.files()["state.pt"]))


def test_r10_a_checkpoint_of_other_optimizers_is_refused() -> None:
    model, other = net(), net()
    files = snapshot(model, Optimizers(both(model)), None, 0).files()
    with pytest.raises(ResumeError, match="SGD and AdamW here, Adagrad and AdamW in the checkpoint"):
        restore(files, other, Optimizers(both(other, torch.optim.SGD)), None)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (torch.optim.LBFGS, r"a LBFGS, whose step\(\) needs a closure\n.*\n.*such as AdamW or SGD"),
        (
            lambda p: [torch.optim.SGD(p, lr=0.1), torch.optim.SGD(p[:1], lr=0.1)],
            "SGD and SGD: some parameters appear in more",
        ),
        (lambda p: [], "no optimizers: optimizer got an empty parameter list"),
    ],
)
def test_an_optimizer_that_cannot_be_stepped_is_refused_with_the_remedy(returned: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=f"Mine.optimizer\n.*{text}"):
        build_optimizer("Mine.optimizer", returned(list(net().parameters())))
