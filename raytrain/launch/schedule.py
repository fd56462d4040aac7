"""Which rows does a run train on, and in how many steps? The data sources, their plans, and the number of steps.

Pure except for the call of the task's `data()`, which may read a few rows. Decides nothing about workers. Runs in the
driver, before Ray starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raytrain.config import RunConfig
from raytrain.data.converted import converting_to
from raytrain.data.given import as_source
from raytrain.data.source import Source
from raytrain.errors import ConfigError, DataError, TaskError
from raytrain.launch.asked_columns import check_asked_columns
from raytrain.plan import Plan
from raytrain.task import Task
from raytrain.worker.hooks import user_code

REQUIRED_HOOKS = ("data", "model", "optimizer", "loss")


@dataclass(frozen=True)
class Schedule:
    """The sources of a run, the plan of each, and the number of optimizer steps."""

    sources: Mapping[str, Source]
    plans: Mapping[str, Plan]
    num_steps: int

    @property
    def train(self) -> Plan:
        return self.plans["train"]


def build_schedule(task: Task, config: RunConfig, say: Callable[[str], None] = lambda text: None) -> Schedule:
    """Calls the task's `data` and plans the run.

    Args:
        say: is told what takes long, as the conversion of data.

    Raises:
        DataError: there is no training data, or it cannot be read.
        StorageError: data cannot be converted into the storage.
        ConfigError: an epoch has no steps, or the task lacks a hook.
        TaskError: `data` raised.
    """
    check_hooks(task)
    with converting_to(config.storage, say):
        sources = _sources(task)
    check_asked_columns(task, sources)
    plans = {name: _plan(source, config, is_training=name == "train") for name, source in sources.items()}
    per_epoch = plans["train"].steps_per_epoch
    if not per_epoch:
        raise ConfigError(
            "run.global_batch",
            config.global_batch,
            f"with run.drop_last, at most the {plans['train'].num_rows} rows of the training data",
            "lower run.global_batch, or leave out run.drop_last",
        )
    return Schedule(sources, plans, config.steps or per_epoch * (config.epochs or 1))


def _sources(task: Task) -> dict[str, Source]:
    where = f"{type(task).__name__}.data"
    with user_code("data"):
        given = task.data()
        if not isinstance(given, Mapping):
            rule, fix = "returns sources by name", 'return {"train": ...}, and other names for what is evaluated on'
            raise DataError(where, type(given).__name__, rule, fix)
        if "train" not in given:
            known = ", ".join(map(str, given)) or "no sources"
            raise DataError(where, known, 'has a source named "train"', 'return {"train": ...}')
        sources = {str(name): as_source(f"{where}, source {name!r}", value) for name, value in given.items()}
    for name, source in sources.items():
        if source.runs_user_code:
            _check_picklable(f"{where}, source {name!r}", source)
    return sources


def _check_picklable(where: str, source: Source) -> None:
    """Raises DataError for a dataset that cannot be sent to workers. Keeps nothing of what it pickles."""
    from ray import cloudpickle

    try:
        with user_code("pickling"), open(os.devnull, "wb") as nothing:
            cloudpickle.CloudPickler(nothing, protocol=5, buffer_callback=lambda buffer: None).dump(source)
    except TaskError as error:
        found = error.traceback.strip().splitlines()[-1]
        fix = "open files and connections in __getitem__, when it is first called, not in __init__"
        raise DataError(where, found, "can be pickled, since workers read it", fix) from error


def check_hooks(task: Task) -> None:
    """Checks that the task defines all required hooks.

    Raises:
        ConfigError: hooks are missing.
    """
    missing = [name for name in REQUIRED_HOOKS if getattr(type(task), name) is getattr(Task, name)]
    if missing:
        rule = "a task defines the methods " + ", ".join(REQUIRED_HOOKS)
        raise ConfigError(f"task {type(task).__name__}", "has no " + ", no ".join(missing), rule, "define them")


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, for run.json; `Plan(**values)` rebuilds it."""
    return {
        "num_rows": plan.num_rows,
        "chunk_rows": None if plan.chunk_rows is None else list(plan.chunk_rows),
        "global_batch": plan.global_batch,
        "num_logical": plan.num_logical,
        "seed": plan.seed,
        "shuffle_window": plan.shuffle_window,
        "drop_last": plan.drop_last,
    }


def _plan(source: Source, config: RunConfig, is_training: bool) -> Plan:
    return Plan(
        num_rows=source.num_rows,
        chunk_rows=source.chunk_rows,
        global_batch=config.global_batch,
        num_logical=config.num_logical,
        seed=config.seed,
        shuffle=is_training,
        shuffle_window=config.shuffle_window,
        drop_last=config.drop_last and is_training,
    )
