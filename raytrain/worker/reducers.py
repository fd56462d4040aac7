"""Who adds up the gradients of the logical workers, and makes the model that the user's loss calls? In the worker.

`DdpReducer` is PyTorch's own: fast, and equal for all numbers of workers up to the order of floating-point sums.
`ExactReducer` leaves no order in: equal to the last bit. When passes happen and what is done with the sum is the stepper's
business.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

import torch

from raytrain.config import RunConfig
from raytrain.errors import TaskError
from raytrain.rendezvous.vitals import WAITING
from raytrain.worker.exact_sum import ExactSum
from raytrain.worker.group import Group
from raytrain.worker.pulse import Pulse
from raytrain.worker.replica import Counted, Replica
from raytrain.worker.state import TrainState


class Reducer(Protocol):
    """The gradients of one generation's steps, each of which is: `begin`, passes, `reduce`, and again if that fails."""

    model: Any
    """What the user's loss calls; `num_calls` says how often it did."""

    @property
    def reduces_now(self) -> bool:
        """Whether the backward pass that begins now waits for the other ranks."""

    def factor(self, planned_rows: int) -> float:
        """By what the sum of the losses of a micro-batch is multiplied before its backward pass."""

    def begin(self) -> None:
        """The passes of a step begin, for the first time or again."""

    def open_pass(self, is_final: bool) -> None:
        """A pass begins; `is_final`: the last one of this rank in the step."""

    def close_share(self) -> None:
        """The passes of one logical worker are over."""

    def pass_without_rows(self) -> torch.Tensor | None:
        """What a rank without rows in a short step goes back through; None for nothing."""

    def reduce(self) -> bool:
        """The parameters have the gradients of all ranks afterwards; False if the passes have to be done again first."""

    def commit(self) -> None:
        """The step counts."""

    def close(self) -> None:
        """The generation ends."""


def reducer_for(config: RunConfig, state: TrainState, group: Group, pulse: Pulse) -> Reducer:
    """The one that the settings ask for."""
    if config.exactness == "bitwise":
        return ExactReducer(config, state, pulse)
    return DdpReducer(config, state, group, pulse)


class DdpReducer:
    """Reduces during the last backward pass."""

    def __init__(self, config: RunConfig, state: TrainState, group: Group, pulse: Pulse) -> None:
        self.model: Any = Replica(state.model, config.find_unused_parameters, pulse)
        self._bare, self._size = state.model, group.size

    @property
    def reduces_now(self) -> bool:
        return bool(self.model.require_backward_grad_sync)

    def factor(self, planned_rows: int) -> float:
        return self._size / planned_rows  # DDP divides by the number of ranks

    def begin(self) -> None:
        self.model.require_backward_grad_sync = False

    def open_pass(self, is_final: bool) -> None:
        self.model.require_backward_grad_sync, self.model.num_calls = is_final, 0

    def close_share(self) -> None:
        """Gradients of all passes add up in the parameters."""

    def pass_without_rows(self) -> torch.Tensor | None:
        self.model.require_backward_grad_sync = True
        idle: torch.Tensor = self.model(idle=True)
        return idle

    def reduce(self) -> bool:
        """Raises TaskError if DDP still waits for the gradients of some parameters, so that the ranks would part."""
        try:
            self.model._check_reducer_finalized()
        except RuntimeError as error:
            raise TaskError(_unused(self._bare, str(error)), "loss") from None
        return True

    def commit(self) -> None:
        """Nothing is kept from one step to the next."""

    def close(self) -> None:
        """Lets go of DDP's reducer, so that the process group is not destroyed by it.

        Its destructor joins gloo's thread while it holds Python's global lock, which that thread may need to end a
        broken reduction (torch 2.13): a deadlock. `destroy_process_group` gives the lock up.
        """
        self.model.reducer = self.model.logger = None


class ExactReducer:
    """Adds up integers, after the passes; see `exact_sum`."""

    reduces_now = False

    def __init__(self, config: RunConfig, state: TrainState, pulse: Pulse) -> None:
        self.model: Any = Counted(state.model)
        self._state, self._pulse, self._num_logical = state, pulse, config.num_logical
        self._trained = [p for p in state.model.parameters() if p.requires_grad]
        self._sum = ExactSum(self._trained, self._num_logical, state.exponents)

    def factor(self, planned_rows: int) -> float:
        return 1 / planned_rows

    def begin(self) -> None:
        self._sum.begin()

    def open_pass(self, is_final: bool) -> None:
        self.model.num_calls = 0

    def close_share(self) -> None:
        self._sum.collect()

    def pass_without_rows(self) -> torch.Tensor | None:
        return None

    def reduce(self) -> bool:
        self._pulse.mark(WAITING)
        return self._sum.reduce()

    def commit(self) -> None:
        self._state.exponents = list(self._sum.exponents)

    def close(self) -> None:
        """Nothing to let go of."""


def _unused(model: torch.nn.Module, message: str) -> str:
    """Names the parameters that got no gradient; DDP's message gives their numbers, by the order of trained parameters."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    numbers = re.search(r"did not receive grad for rank \d+: ((?:\d+ ?)+)", message)
    unused = ", ".join(names[int(number)] for number in numbers[1].split()) if numbers else "some parameters"
    return (
        f"the loss does not depend on {unused}; every parameter that is trained takes part in the last pass of each step, "
        "or run.find_unused_parameters is set (--run.find-unused-parameters)"
    )
