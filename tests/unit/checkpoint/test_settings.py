"""A state under other settings: what was gathered is the saved one, rates and schedule are the live ones."""

from __future__ import annotations

import torch
from torch import nn

from raytrain.checkpoint.state import restore, snapshot


def trained(lr: float, momentum: float, num_steps: int, steps_to_do: int = 0) -> tuple[nn.Module, torch.optim.SGD, object]:
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    for _ in range(steps_to_do):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def test_r15_a_clone_keeps_its_own_rates_on_its_own_schedule_and_takes_the_others_weights_and_momentum() -> None:
    theirs = trained(0.1, 0.9, 40, steps_to_do=10)
    files = snapshot(*theirs, 10, []).files()
    model, optimizer, scheduler = trained(0.3, 0.5, 40)
    restored = restore(files, model, optimizer, scheduler, keeps_settings=True)
    assert restored.step == 10
    torch.testing.assert_close(model.state_dict(), theirs[0].state_dict())
    for mine, other in zip(model.parameters(), theirs[0].parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[mine]["momentum_buffer"], theirs[1].state[other]["momentum_buffer"])
    _, expected, _ = trained(0.3, 0.5, 40, steps_to_do=10)
    assert optimizer.param_groups[0]["lr"] == expected.param_groups[0]["lr"]
    assert (optimizer.param_groups[0]["momentum"], scheduler.last_epoch) == (0.5, 10)


def test_without_that_the_saved_rates_go_on() -> None:
    files = snapshot(*trained(0.1, 0.9, 40, steps_to_do=10), 10, []).files()
    model, optimizer, scheduler = trained(0.3, 0.5, 40)
    restore(files, model, optimizer, scheduler)
    _, expected, _ = trained(0.1, 0.9, 40, steps_to_do=10)
    assert optimizer.param_groups[0]["lr"] == expected.param_groups[0]["lr"]
