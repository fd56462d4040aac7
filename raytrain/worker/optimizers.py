"""What may the hook `optimizer` return? One optimizer, or several over disjoint parameters, as one.

Runs in the worker's training thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch.optim import Optimizer

from raytrain.errors import ConfigError, TaskError
from raytrain.worker.hooks import describe
from raytrain.worker.lr_schedule import required_arguments


def build_optimizer(where: str, returned: Any) -> Optimizer:
    """The optimizer that the hook returned; several become one, whose parameter groups are those of all.

    Raises:
        TaskError: it is no optimizer.
        ConfigError: it cannot be stepped without a closure, or two optimizers have the same parameter.
    """
    several: list[Any] = list(returned) if isinstance(returned, list | tuple) else [returned]
    for each in several:
        if not isinstance(each, Optimizer):
            raise TaskError(
                f"optimizer returned {describe(each)}; it returns a torch.optim.optimizer.Optimizer", "optimizer"
            )
        if required_arguments(each.step):
            rule = "gradients are summed over the workers once per step, so the loss cannot be computed again within it"
            fix = "use an optimizer whose step() needs no closure, such as AdamW or SGD"
            raise ConfigError(where, f"a {type(each).__name__}, whose step() needs a closure", rule, fix)
    if len(several) == 1:
        optimizer: Optimizer = several[0]
        return optimizer
    try:
        return Optimizers(several)
    except ValueError as error:
        kinds = " and ".join(type(each).__name__ for each in several) or "no optimizers"
        rule = "several optimizers have disjoint parameters, and minimise one loss"
        raise ConfigError(where, f"{kinds}: {error}", rule, "return one optimizer for each parameter") from None


class Optimizers(Optimizer):
    """Several optimizers that are zeroed, stepped, saved and loaded as one; parameter groups and states are theirs.

    A scheduler of it schedules the parameter groups of all.

    Raises:
        ValueError: a parameter is in two of them, or there is none.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        super().__init__([{"params": group["params"]} for each in optimizers for group in each.param_groups], {})
        self._share_groups()

    @property
    def class_names(self) -> str:
        """Of the optimizers; checkpoints of others are refused."""
        return " and ".join(type(each).__name__ for each in self.optimizers)

    @property
    def state(self) -> Any:
        """By parameter; read-only."""
        return _States(self.optimizers)

    @state.setter
    def state(self, state: object) -> None:
        """Called by the base class, which believes that the state is its own."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by `load_state_dict`, with all states and parameter groups."""
        groups = iter(state["param_groups"])
        for each in self.optimizers:
            own = [next(groups) for _ in each.param_groups]
            parameters = {id(parameter) for group in own for parameter in group["params"]}
            states = defaultdict(dict, {key: value for key, value in state["state"].items() if id(key) in parameters})
            each.__setstate__({"state": states, "param_groups": own})
        self._share_groups()

    def _share_groups(self) -> None:
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]


class _States(Mapping[Any, Any]):
    """The states of several optimizers, without adding an entry for a key that is asked for."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._states = [each.state for each in optimizers]

    def __getitem__(self, key: Any) -> Any:
        for state in self._states:
            if key in state:
                return state[key]
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._states)

    def __len__(self) -> int:
        return sum(map(len, self._states))
