"""Which scheduler and which searcher of Ray Tune does a sweep use, and what does a scheduler keep over a restart?

Checks what goes together. Ray Tune saves the searcher and the trials, but not the scheduler: `dump_scheduler` and
`load_scheduler` add its state to the same snapshot. Runs in the driver.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ray import cloudpickle
from ray.tune.experiment import Trial
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
from raytrain.tune.clone import ROW_SETTINGS
from raytrain.tune.space import grid_of

REDUCTION = 3
"""Reduction factor of ASHA and HyperBand: one in so many trials continues after each rung."""
UNFINISHED = "_FutureTrainingResult"
"""Ray Tune's class for a checkpoint that a trial is still saving; it means nothing in another process."""


@dataclass(frozen=True)
class Algorithms:
    """What decides in a sweep.

    Args:
        scheduler: which trials continue.
        searcher: which values a trial gets; None for random ones.
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
    ) -> Algorithms:
        """Those that are given, or those that are named in `sweep`.

        Raises:
            ConfigError: they do not go together.
        """
        chosen = _scheduler(scheduler, sweep, config)
        if isinstance(searcher, list | tuple):
            rule = "one searcher chooses the values of a trial"
            raise ConfigError("sweep.search", f"{len(searcher)} searchers", rule, "give one of them")
        _check_limits(chosen, sweep)
        if searcher is None and sweep.search == "random":
            return cls(chosen, None)
        name = type(searcher).__name__ if searcher else sweep.search
        if isinstance(chosen, PopulationBasedTraining):
            rule = "either a searcher or the scheduler chooses the values of a trial"
            fix = "leave sweep.search at random, for the values that trials begin with, or use another scheduler"
            raise ConfigError("sweep.search", f"{name}, with {type(chosen).__name__}", rule, fix)
        if grids := [key for key, domain in space.items() if grid_of(domain) is not None]:
            rule, fix = "either a searcher or a grid chooses values", "write it as a choice, or search at random"
            raise ConfigError(f"sweep.space.{grids[0]}", f"a grid, with {name}", rule, fix)
        if getattr(searcher, "_space", None):
            rule = "either the sweep or the searcher has the search space"
            raise ConfigError("sweep.search", f"{name} with a space of its own", rule, "give the space to the sweep only")
        return cls(chosen, searcher or _optuna(sweep))

    def search(self, sweep: SweepConfig, max_trials: int | None, num_fitting: int) -> tuple[Any, int | None]:
        """The searcher for `tune.run`, and `max_concurrent_trials`.

        Args:
            sweep: settings of the sweep.
            max_trials: trials that the sweep's workers allow; None for no limit.
            num_fitting: trials for which the cluster has room; a searcher that learns must not run ahead of it.
        """
        limits = [limit for limit in (sweep.concurrent, max_trials) if limit is not None]
        if self.searcher is None:
            return BasicVariantGenerator(max_concurrent=min(limits, default=0), random_state=sweep.seed), None
        return self.searcher, min(limits, default=num_fitting)


def _scheduler(given: TrialScheduler | None, sweep: SweepConfig, config: RunConfig) -> TrialScheduler:
    """A scheduler whose time is in epochs, or in steps if the length of a run is given in steps."""
    if given is not None:
        _check_scheduler(given)
        return given
    axis, length, first = ("step", config.steps, config.eval_every) if config.steps else ("epoch", config.epochs or 1, 1)
    grace = min(length, max(first or 1, length // REDUCTION**3))
    if sweep.scheduler == "asha":
        return AsyncHyperBandScheduler(time_attr=axis, max_t=length, grace_period=grace, reduction_factor=REDUCTION)
    if sweep.scheduler == "hyperband":
        return HyperBandScheduler(time_attr=axis, max_t=length, reduction_factor=REDUCTION)
    if sweep.scheduler == "median":
        return MedianStoppingRule(time_attr=axis, grace_period=max(grace, length // 10))
    return FIFOScheduler()


def _check_scheduler(scheduler: TrialScheduler) -> None:
    if getattr(scheduler, "_metric", None):
        rule = "the sweep's metric and mode are those of its scheduler"
        raise ConfigError("sweep.scheduler", f"has the metric {scheduler._metric}", rule, "leave out its metric and mode")
    changed = getattr(scheduler, "_hyperparam_mutations", None) or getattr(scheduler, "_hyperparam_bounds", None) or {}
    for name in ROW_SETTINGS:
        if f"run.{name}" in changed:
            rule = "a clone continues at the same step with the next rows, so the settings that choose rows stay the same"
            fix = f"remove run.{name} from what it may change"
            raise ConfigError("sweep.scheduler", f"changes run.{name}", rule, fix)


def _check_limits(scheduler: TrialScheduler, sweep: SweepConfig) -> None:
    for name in ("concurrent", "workers"):
        if isinstance(scheduler, HyperBandScheduler) and (value := getattr(sweep, name)) is not None:
            rule = "hyperband starts and pauses all trials of a bracket before it ends any of them"
            raise ConfigError(f"sweep.{name}", value, rule, f"leave out sweep.{name}, or use asha")


def _optuna(sweep: SweepConfig) -> Searcher:
    try:
        import optuna  # noqa: F401 - what Ray Tune needs for it
        from ray.tune.search.optuna import OptunaSearch
    except ImportError as error:
        rule, fix = "Optuna is installed", "pip install 'raytrain[optuna]', or leave sweep.search at random"
        raise ConfigError("sweep.search", "optuna", rule, fix) from error
    return OptunaSearch(seed=sweep.seed)


def dump_scheduler(scheduler: TrialScheduler) -> bytes:
    """The scheduler's state; trials are stored by their ids."""
    stream = io.BytesIO()
    _Pickler(stream).dump(vars(scheduler))
    return stream.getvalue()


def load_scheduler(state: bytes, scheduler: TrialScheduler, trials: Iterable[Trial]) -> None:
    """Gives a new scheduler of the same kind the state that `dump_scheduler` returned.

    Args:
        trials: the restored ones; for the scheduler, any other trial has ended.
    """
    unpickler = _Unpickler(io.BytesIO(state))
    unpickler.trials = {trial.trial_id: trial for trial in trials}
    vars(scheduler).update(unpickler.load())


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def persistent_id(self, value: Any) -> tuple[str, str] | None:
        if isinstance(value, Trial):
            return "trial", value.trial_id
        return ("unfinished", "") if type(value).__name__ == UNFINISHED else None


class _Unpickler(pickle.Unpickler):
    trials: Mapping[str, Trial] = {}

    def persistent_load(self, identity: tuple[str, str]) -> Any:
        kind, trial_id = identity
        return self.trials.get(trial_id, _EndedTrial(trial_id)) if kind == "trial" else None


class _EndedTrial:
    """Stands for a trial that was not restored."""

    status = Trial.TERMINATED

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id

    def is_finished(self) -> bool:
        return True
