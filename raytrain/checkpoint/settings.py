"""A state that goes on under other settings than those it was saved with: other learning rates, another momentum.

What was gathered of each parameter (momentum, moments) is the saved one; settings and schedule are those of the live
objects, as they are after as many steps. Runs in the workers' processes.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def load_under_own_settings(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """As `optimizer.load_state_dict(saved)`, but the settings of each parameter group stay. Raises ValueError likewise."""
    own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)


def advance(scheduler: LRScheduler, num_steps: int) -> None:
    """Takes a scheduler that has made no step yet to where it is after so many, with its optimizer's learning rates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")  # the optimizer has made none
        for _ in range(num_steps):
            scheduler.step()
