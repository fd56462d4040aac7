"""Ray Tune's schedulers and searchers, by name or as they are, with what goes together and what does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import BasicVariantGenerator, SearchAlgorithm, Searcher

from raytrain.config import RunConfig
from raytrain.errors import ConfigError
from raytrain.sweep_config import SweepConfig
from raytrain.tune.clone import PLACE_SETTINGS

REDUCTION = 3
"""Of ASHA and HyperBand: one in so many trials goes on from each rung."""
LAST_RUNGS = REDUCTION**3


def scheduler_of(given: TrialScheduler | None, sweep: SweepConfig, config: RunConfig) -> TrialScheduler:
    """The scheduler of a sweep, whose time is in epochs, or in steps where a run is so many steps long.

    Args:
        given: a scheduler of Ray Tune's, without metric and mode; None for the one that is named in `sweep`.

    Raises:
        ConfigError: it has a metric of its own, or changes settings that must stay.
    """
    if given is not None:
        _check(given)
        return given
    axis, length, first = ("step", config.steps, config.eval_every) if config.steps else ("epoch", config.epochs or 1, 1)
    grace = min(length, max(first or 1, length // LAST_RUNGS))
    if sweep.scheduler == "asha":
        return AsyncHyperBandScheduler(time_attr=axis, max_t=length, grace_period=grace, reduction_factor=REDUCTION)
    if sweep.scheduler == "hyperband":
        return HyperBandScheduler(time_attr=axis, max_t=length, reduction_factor=REDUCTION)
    if sweep.scheduler == "median":
        return MedianStoppingRule(time_attr=axis, grace_period=max(grace, length // 10))
    return FIFOScheduler()


def _check(scheduler: TrialScheduler) -> None:
    if getattr(scheduler, "_metric", None):
        rule = "the sweep's metric and mode are those of its scheduler"
        raise ConfigError("sweep.scheduler", f"has the metric {scheduler._metric}", rule, "leave out its metric and mode")
    changed = getattr(scheduler, "_hyperparam_mutations", None) or getattr(scheduler, "_hyperparam_bounds", None) or {}
    for name in PLACE_SETTINGS:
        if f"run.{name}" in changed:
            rule = "a clone goes on at the same step with the next rows, so the settings that choose rows stay the same"
            raise ConfigError("sweep.scheduler", f"changes run.{name}", rule, f"take run.{name} out of what it may change")


@dataclass(frozen=True)
class Choice:
    """What decides in a sweep.

    Args:
        scheduler: which trials go on.
        searcher: a searcher of Ray Tune's; None for random values.
    """

    scheduler: TrialScheduler
    searcher: Searcher | SearchAlgorithm | None

    @classmethod
    def of(
        cls,
        scheduler: TrialScheduler | None,
        searcher: Any,
        sweep: SweepConfig,
        config: RunConfig,
        space: Mapping[str, Any],
    ) -> Choice:
        """Those that were given, or those that are named in `sweep`.

        Raises:
            ConfigError: they do not fit together.
        """
        chosen = scheduler_of(scheduler, sweep, config)
        if isinstance(searcher, list | tuple):
            rule = "one searcher chooses the values of a trial"
            raise ConfigError("sweep.search", f"{len(searcher)} searchers", rule, "give one of them")
        _check_waiting(chosen, sweep)
        if searcher is None and sweep.search == "random":
            return cls(chosen, None)
        name = type(searcher).__name__ if searcher else sweep.search
        if isinstance(chosen, PopulationBasedTraining):
            rule = "a scheduler that changes values and a searcher are two that choose them"
            fix = "leave sweep.search at random, for the values that trials begin with, or take another scheduler"
            raise ConfigError("sweep.search", f"{name}, with {type(chosen).__name__}", rule, fix)
        if grids := [key for key, domain in space.items() if isinstance(domain, dict) and "grid_search" in domain]:
            rule, fix = "a grid and a searcher are two that choose values", "write it as a choice, or search at random"
            raise ConfigError(f"sweep.space.{grids[0]}", f"a grid, with {name}", rule, fix)
        if getattr(searcher, "_space", None):
            rule = "one of the two says what is searched"
            raise ConfigError("sweep.search", f"{name} with a space of its own", rule, "give the space to the sweep alone")
        return cls(chosen, searcher or _optuna(sweep))

    def search(self, sweep: SweepConfig, most: int | None, num_fitting: int) -> tuple[Any, int | None]:
        """The searcher for `tune.run`, and the most trials at a time as it wants to have them.

        Args:
            sweep: settings of the sweep.
            most: trials that the sweep's workers allow; None for no limit.
            num_fitting: trials for which the cluster has room; a searcher that learns must not run ahead of it.
        """
        limits = [limit for limit in (sweep.concurrent, most) if limit is not None]
        if self.searcher is None:
            return BasicVariantGenerator(max_concurrent=min(limits, default=0), random_state=sweep.seed), None
        return self.searcher, min(limits, default=num_fitting)


def _check_waiting(scheduler: TrialScheduler, sweep: SweepConfig) -> None:
    """HyperBand waits for all trials of a bracket, so all of them must be allowed to begin."""
    for name in ("concurrent", "workers"):
        if isinstance(scheduler, HyperBandScheduler) and (value := getattr(sweep, name)) is not None:
            rule = "hyperband begins and pauses all trials of a bracket before it ends any of them"
            raise ConfigError(f"sweep.{name}", value, rule, f"leave out sweep.{name}, or take asha")


def _optuna(sweep: SweepConfig) -> Searcher:
    try:
        import optuna  # noqa: F401 - what Ray Tune needs for it
        from ray.tune.search.optuna import OptunaSearch
    except ImportError as error:
        rule, fix = "Optuna is installed", "pip install 'raytrain[optuna]', or leave sweep.search at random"
        raise ConfigError("sweep.search", "optuna", rule, fix) from error
    return OptunaSearch(seed=sweep.seed)
