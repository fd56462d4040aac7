"""What is this sweep, and is it the one whose directory is there? Facts for `sweep.json`, and their comparison.

A sweep that would go on with something else than what its result depends on is refused, and what differs is named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from pyarrow import fs
from ray.tune.search.sample import Domain, Function, Normal, Quantized

from raytrain.config import RunConfig
from raytrain.errors import ConfigError, ResumeError
from raytrain.launch.resume import differences
from raytrain.launch.work import Schedule
from raytrain.rundir import RunDir
from raytrain.sweep_config import SweepConfig
from raytrain.task import Task
from raytrain.tune.recipe import Recipe
from raytrain.tune.schedulers import Choice

SWEEP = "sweep.json"
RUN_SETTINGS = (
    *("global_batch", "logical_workers", "micro_batch", "epochs", "steps", "seed", "shuffle_window", "drop_last"),
    *("precision", "exactness", "clip_norm", "best", "eval_every"),
)
"""Settings of every run on which the outcome of a sweep depends; workers are not among them."""
SWEEP_SETTINGS = ("trials", "seed")


def run_config(task: Callable[..., Task], config: RunConfig, sweep: SweepConfig, trial_workers: Any) -> RunConfig:
    """The settings of every run: with the sweep's name and metric, and the workers of one trial.

    Raises:
        ConfigError: a metric is given without a mode, or the other way round.
    """
    if bool(sweep.metric) != bool(sweep.mode):
        given, missing = ("metric", "mode") if sweep.metric else ("mode", "metric")
        rule = "metric and mode go together: which metric, and whether the smallest or the largest value is best"
        raise ConfigError(f"sweep.{missing}", f"not given, and sweep.{given} is", rule, f"give sweep.{missing} too")
    changed: dict[str, Any] = {"name": config.name or _name_of(task)}
    if sweep.metric:
        changed["best"] = f"{sweep.mode}:{sweep.metric}"
    if trial_workers is not None:
        changed["workers"] = trial_workers
    return RunConfig(**config.model_dump() | changed)


def _name_of(task: Callable[..., Task]) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", getattr(task, "__name__", "task")).lower() + "-sweep"


def grid_of(domain: Any) -> list[Any] | None:
    """The values of a grid; None for anything else."""
    return list(domain["grid_search"]) if isinstance(domain, dict) and set(domain) == {"grid_search"} else None


def num_trials(space: Mapping[str, Any], samples: int) -> int:
    """Trials in all: `samples` of each point of the grid, if there is one."""
    return samples * math.prod(len(grid) for domain in space.values() if (grid := grid_of(domain)) is not None)


def example(space: Mapping[str, Any]) -> dict[str, Any]:
    """Values that a trial could have."""
    values, made_of_others = dict[str, Any](), {}
    for name, domain in space.items():
        grid = grid_of(domain)
        if isinstance(domain, Function):
            made_of_others[name] = domain
        elif grid is not None:
            values[name] = grid[0]
        else:
            values[name] = domain.sample(random_state=0) if isinstance(domain, Domain) else domain
    for name, domain in made_of_others.items():
        values[name] = domain.sample(config=dict(values))
    return values


def facts(recipe: Recipe, sweep: SweepConfig, space: Mapping[str, Any], choice: Choice, work: Schedule) -> dict[str, Any]:
    """What the outcome of a sweep depends on, as plain values.

    Args:
        recipe, sweep, space: of the sweep.
        choice: its scheduler and its searcher.
        work: of a trial.
    """
    return {
        "format": 1,
        "task": {"name": getattr(recipe.make, "__name__", "task"), "fields": {k: str(v) for k, v in recipe.fixed.items()}},
        "space": {name: _text(domain) for name, domain in space.items()},
        "sweep": {
            **{name: getattr(sweep, name) for name in SWEEP_SETTINGS},
            "scheduler": type(choice.scheduler).__name__,
            "search": type(choice.searcher).__name__ if choice.searcher else "random",
        },
        "run": {name: recipe.config.model_dump(mode="json")[name] for name in RUN_SETTINGS},
        "data": {name: source.fingerprint() for name, source in work.sources.items()},
    }


def earlier(directory: RunDir, mode: str) -> dict[str, Any] | None:
    """The content of `sweep.json`, or None for a sweep that begins.

    Args:
        directory: of the sweep.
        mode: auto, new or must.

    Raises:
        ResumeError: the mode does not allow what is there, or it cannot be read.
    """
    exists = directory.exists(SWEEP)
    if mode == "new" and exists:
        raise ResumeError("run.resume", "new", f"there is no sweep at {directory.path} yet", "choose another run.name")
    if mode == "must" and not exists:
        raise ResumeError("run.resume", "must", f"there is a sweep at {directory.path}", "check run.name and run.storage")
    if not exists:
        return None
    try:
        found: dict[str, Any] = directory.read_json(SWEEP)
    except ValueError as error:
        raise ResumeError(directory.child(SWEEP), error, "is the JSON of a sweep", "choose another run.name") from error
    return found


def check_same(directory: RunDir, before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """Compares the sweep that is there with the one that is asked for.

    Raises:
        ResumeError: something that alters the outcome differs.
    """
    if before is None:
        return
    if found := [line for name in now for line in differences(name, before.get(name), now[name])]:
        raise ResumeError(
            f"sweep {directory.path}",
            "\n         ".join(found),
            "a sweep goes on with the settings and data that its outcome depends on",
            "set them back, or choose another run.name",
        )


def has_trials(directory: RunDir) -> bool:
    """Whether Ray Tune has saved a state of this sweep."""
    found = directory.filesystem.get_file_info(fs.FileSelector(directory.path, allow_not_found=True))
    return any(info.base_name.startswith("experiment_state-") for info in found)


def _text(domain: Any) -> str:
    """The same text for the same domain, also in another process: nothing says where something lies in memory."""
    if isinstance(domain, Function):
        return f"Function {getattr(domain.func, '__qualname__', type(domain.func).__name__)}"
    if isinstance(domain, Domain):
        return f"{type(domain).__name__}{domain.domain_str} {_how(domain.sampler)}".strip()
    return str(domain)


def _how(sampler: Any) -> str:
    if isinstance(sampler, Quantized):
        return f"{_how(sampler.sampler)} in steps of {sampler.q:g}"
    if isinstance(sampler, Normal):
        return f"Normal of mean {sampler.mean:g} and deviation {sampler.sd:g}"
    return str(sampler) if sampler else ""
