"""`raytrain.trainable`: elastic runs as trials of a plain `ray.tune.Tuner`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ray import tune

from raytrain.config import RunConfig
from raytrain.errors import ConfigError
from raytrain.launch.cluster import choose_accelerator, worker_resources
from raytrain.task import Task
from raytrain.tune.recipe import Packed, Recipe, recipe
from raytrain.tune.trial import EndsInOrder, Terms, run_trial

HEAD = {"node:__internal_head__": 0.001}
"""A place for the trial's own process, which trains nothing: on the head node, which stays."""


def trainable(task: Callable[..., Task], config: RunConfig | None = None) -> Callable[[dict[str, Any]], None]:
    """A function for `ray.tune.Tuner`, each of whose trials is an elastic run.

    Keys of the search space without a prefix are fields of the task, `run.` keys are settings of the run. Each trial
    reports its evaluations under their names (valid/loss), with `step`, `epoch` and `rows`, which count over the whole life
    of the trial, and its checkpoints by reference. A trial begins once there is room for its smallest number of workers;
    room beyond that goes to those that have the fewest workers. Its run directory is `<run.storage>/<experiment>/<trial>`.

    Args:
        task: the class of the task, or a function that makes one of the values of a trial.
        config: settings of every run; `run.best` is the metric by which trials are ranked.

    Raises (the Tuner, before the first trial):
        ConfigError: a key is unknown, a value is wrong, or trials cannot share workers in place.
    """
    return as_trainable(recipe(task, config), Terms())


def as_trainable(made: Recipe, terms: Terms) -> Callable[[dict[str, Any]], None]:
    """A function for `ray.tune.Tuner`; see `trainable`."""
    check_elasticity(made.config)
    packed = Packed.of(made)

    def trial(config: dict[str, Any]) -> None:
        run_trial(packed.open(), terms, config)

    trial.__mixins__ = (EndsInOrder,)  # type: ignore[attr-defined]
    with_room: Callable[[dict[str, Any]], None] = tune.with_resources(trial, partial(smallest_group, packed))
    return with_room


def smallest_group(packed: Packed, values: Mapping[str, Any]) -> tune.PlacementGroupFactory:
    """What Ray Tune reserves for a trial; called in the driver, once per trial, before the trial starts.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    _, config = packed.open().resolve(values)
    worker = worker_resources(config, choose_accelerator(config.accelerator))
    return tune.PlacementGroupFactory([HEAD, *[worker] * config.min_workers])


def check_elasticity(config: RunConfig) -> None:
    """Trials share workers in place, or not at all.

    Raises:
        ConfigError: the setting, or this Ray, does not allow that.
    """
    from raytrain.elastic.contract import CHECKED_ON, violations

    found = violations()
    if config.elasticity != "restart" and not found:
        return
    raise ConfigError(
        "run.elasticity",
        "restart" if config.elasticity == "restart" else f"{config.elasticity}, with another Ray: {found[0]}",
        f"trials of a sweep share workers in place, as Ray {CHECKED_ON} allows",
        f"leave run.elasticity at auto, with Ray {CHECKED_ON}",
    )
