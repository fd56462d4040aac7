"""What is the value of a metric over all rows? The forms that `metrics` may return, added up over micro-batches.

Each value becomes a tally on the host. Tallies are added in the order of micro-batches and of logical workers, so that the
values do not depend on who evaluated which rows. Knows torchmetrics objects by their attributes; imports no torchmetrics.
Runs in the worker's training thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raytrain.errors import TaskError
from raytrain.task import Sum, Task
from raytrain.worker.hooks import as_scalar, as_sum, describe, user_code

STACKED = "stacked"
"""A tensor without a reduction: torchmetrics stacks those of all processes, and we those of all micro-batches."""

_OBJECT_METHODS = ("reset", "update", "compute")
_REMEDY = "give `metrics` an object whose states are added up or gathered, a Sum with `summarise`, or one value per row"


@dataclass(frozen=True)
class Mean:
    """A sum and its weight.

    Args:
        scalar_eps: the task returned a scalar, rounded to so much of its size, and only the task knows whether it is a mean;
            None if it returned another form.
    """

    sum: float
    weight: float
    scalar_eps: float | None = None

    @property
    def value(self) -> float:
        return self.sum / self.weight if self.weight else 0.0

    def plus(self, other: Mean) -> Mean:
        return Mean(self.sum + other.sum, self.weight + other.weight, self.scalar_eps)


@dataclass(frozen=True)
class Total:
    """What a `Sum` adds up to: float64."""

    value: torch.Tensor

    def plus(self, other: Total) -> Total:
        if self.value.shape != other.value.shape:
            shapes = f"{tuple(self.value.shape)} and {tuple(other.value.shape)}"
            raise TaskError(
                f"a Sum has the shapes {shapes} in two micro-batches; it has one shape in all of them", "metrics"
            )
        return Total(self.value + other.value)


@dataclass(frozen=True)
class States:
    """The states of a torchmetrics object.

    Args:
        values: by attribute: a tensor (stacked, shape [1, ...], if it has no reduction), or a list of tensors.
        reductions: by attribute: the name of the function by which torchmetrics reduces it over processes, or STACKED.
    """

    values: Mapping[str, Any]
    reductions: Mapping[str, str]
    num_updates: int

    def plus(self, other: States) -> States:
        values = {
            name: _reduced(reduction, self.values[name], other.values[name]) for name, reduction in self.reductions.items()
        }
        return States(values, self.reductions, self.num_updates + other.num_updates)


Tally = Mean | Total | States
Tallies = dict[str, Tally]


def tally(value: Any, rows: int, name: str) -> Tally:
    """The tally of what the task returned for one micro-batch.

    Raises:
        TaskError: the value has another form.
    """
    if isinstance(value, Sum):
        return Total(_total(value, name))
    if is_metric_object(value):
        return _states(value, name)
    total, weight = as_sum(value, rows, name)
    return Mean(float(total.detach()), float(weight), None if as_scalar(value) is None else _eps(value))


def is_metric_object(value: object) -> bool:
    """Whether a value can be reset, updated and computed, as a torchmetrics object can."""
    return all(callable(getattr(value, method, None)) for method in _OBJECT_METHODS)


def add_all(total: Tallies, more: Mapping[str, Tally]) -> None:
    """Adds `more` to `total`."""
    for name, other in more.items():
        mine = total.get(name)
        if mine is not None and type(mine) is not type(other):
            raise TaskError(f"{name} has two forms, {type(mine).__name__} and {type(other).__name__}", "metrics")
        total[name] = other if mine is None else mine.plus(other)  # type: ignore[arg-type]


def scalars_in(tallies: Mapping[str, Tally]) -> dict[str, Mean]:
    """Those that the task returned as scalars."""
    return {name: each for name, each in tallies.items() if isinstance(each, Mean) and each.scalar_eps is not None}


def values_of(task: Task, tallies: Mapping[str, Tally], objects: Mapping[str, Any]) -> dict[str, float]:
    """What is reported: means, the values of metric objects, and what `summarise` returns for the sums.

    Args:
        tallies: over all rows.
        objects: a metric object for each `States`, reset; it is not changed.

    Raises:
        TaskError: `summarise` or `compute` raised, or did not return a number.
    """
    values: dict[str, float] = {}
    for name, each in tallies.items():
        if isinstance(each, Mean):
            values[name] = each.value
        elif isinstance(each, States):
            values[name] = _computed(name, objects.get(name), each)
    sums = {name: each.value for name, each in tallies.items() if isinstance(each, Total)}
    if sums or type(task).summarise is not Task.summarise:
        with user_code("summarise"):
            summary = dict(task.summarise(sums))
        for name, value in summary.items():
            if name in values:
                raise TaskError(f"summarise returned {name!r}, which is the name of another metric", "summarise")
            values[name] = _number(
                value, f"summarise[{name!r}]", "define `summarise`, and compute numbers from the sums there"
            )
    return values


def _eps(scalar: Any) -> float:
    is_rounded = isinstance(scalar, torch.Tensor) and scalar.is_floating_point()
    return torch.finfo(scalar.dtype).eps if is_rounded else 0.0


def _total(value: Sum, name: str) -> torch.Tensor:
    try:
        return torch.as_tensor(value.value).detach().double().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise TaskError(f"{name} returned Sum({describe(value.value)}); a Sum holds a number or a tensor", name) from None


def _states(metric: Any, name: str) -> States:
    """The states of an object that was updated with the rows of one micro-batch."""
    kind = type(metric).__name__
    reductions = getattr(metric, "_reductions", None)
    parts = [child for child in getattr(metric, "children", tuple)() if is_metric_object(child)]
    if not reductions or parts:
        why = (
            f"is made of other metrics ({type(parts[0]).__name__})"
            if parts
            else "has no states that torchmetrics would add up"
        )
        raise TaskError(f"{name} returned a {kind}, which {why}; {_REMEDY}", name)
    names = {state: STACKED if how is None else getattr(how, "__name__", "") for state, how in reductions.items()}
    if unknown := [state for state, how in names.items() if how not in (*_REDUCE, STACKED)]:
        raise TaskError(f"{name} returned a {kind} whose state {unknown[0]} has a reduction of its own; {_REMEDY}", name)
    num_updates = int(getattr(metric, "_update_count", 1))
    if not num_updates:
        raise TaskError(f"{name} returned a {kind} without rows; call its update(...) with the rows of the batch", name)
    return States({state: _on_host(getattr(metric, state), how) for state, how in names.items()}, names, num_updates)


def _on_host(state: Any, reduction: str) -> Any:
    if isinstance(state, list):
        return [item.detach().cpu() if isinstance(item, torch.Tensor) else item for item in state]
    host = state.detach().cpu()
    return host.unsqueeze(0) if reduction == STACKED else host


def _computed(name: str, metric: Any, states: States) -> float:
    """The value of the states, computed by a copy of the metric object, in this process alone."""
    if metric is None:
        raise TaskError(f"{name} is a metric object for some micro-batches only; return it for each one", "metrics")
    with user_code(f"compute of {name}"):
        own = copy.deepcopy(metric)
        own = own.cpu() if callable(getattr(own, "cpu", None)) else own
        for state, value in states.values.items():
            is_alone = states.reductions[state] == STACKED and not isinstance(value, list) and len(value) == 1
            setattr(own, state, value[0] if is_alone else value)
        own._update_count, own._computed = states.num_updates, None
        own.distributed_available_fn = _alone  # else it would add up the states of all ranks once more
        value = own.compute()
    return _number(value, f"compute of {name}", "choose an average, or return one metric per number")


def _alone() -> bool:
    return False


def _number(value: Any, what: str, fix: str) -> float:
    number = as_scalar(value.squeeze() if isinstance(value, torch.Tensor) else value)
    if number is None:
        raise TaskError(f"{what} returned {describe(value)}; it returns one number: {fix}", what)
    return float(number.detach())


def _reduced(reduction: str, mine: Any, theirs: Any) -> Any:
    if isinstance(mine, list):
        return [*mine, *theirs]
    return _REDUCE.get(reduction, _joined)(mine, theirs)


def _joined(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return torch.cat([each if each.ndim else each.reshape(1) for each in (mine, theirs)])


def _same(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The mean over micro-batches of different sizes is exact for a setting only, which is the same in all of them."""
    if not torch.equal(mine, theirs):
        raise TaskError(
            f"a metric object has a state that is a mean of micro-batches, which is not exact; {_REMEDY}", "metrics"
        )
    return mine


_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
    "dim_zero_cat": _joined,
    "dim_zero_mean": _same,
}
"""How two states become one, by the names of torchmetrics' reductions."""
