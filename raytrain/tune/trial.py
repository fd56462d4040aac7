"""What is a trial of a sweep? One elastic run, in the process that Ray Tune starts for the trial.

`trainable` makes the function that Ray Tune runs. A trial takes its smallest group of workers from its own placement group
and the others from the sweep's broker, reports each evaluation to Ray Tune, and continues where its run was, or where
another trial's was.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from threading import Thread
from typing import Any

import ray
from pydantic import BaseModel
from ray import cloudpickle, tune

from raytrain.config import RunConfig
from raytrain.elastic.placement import ResourceLease
from raytrain.errors import ConfigError, ResumeError
from raytrain.launch.cluster import choose_accelerator, worker_resources
from raytrain.launch.storage import absolute
from raytrain.launch.trainer import Trainer
from raytrain.task import Task, pickle_by_value
from raytrain.tune.broker import broker_of
from raytrain.tune.clone import clone, delete_run, read_reference
from raytrain.tune.reporter import Reporter
from raytrain.tune.space import check_keys, fields_of

RUN_PREFIX = "run."
HEAD = {"node:__internal_head__": 0.001}
"""The bundle of the trial's own process, which does not train: on the head node, which stays."""
END_LIMIT_S = 5.0
"""How long a run may take to end after Ray Tune has ended its trial: its workers are killed, its event log is closed."""


@dataclass(frozen=True)
class TrialTemplate:
    """Makes the task and the settings of each trial.

    Args:
        make: the class of the task, or a function that makes one.
        config: the settings of every trial, with an absolute storage.
        fixed: fields of the task, or parameters of the function, that are the same in every trial.
    """

    make: Callable[..., Task]
    config: RunConfig
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, make: Callable[..., Task], config: RunConfig | None = None, fixed: Mapping[str, Any] | None = None
    ) -> TrialTemplate:
        """Makes the storage absolute, since trials run elsewhere."""
        config = config or RunConfig()
        return cls(make, RunConfig(**config.model_dump() | {"storage": absolute(config.storage)}), dict(fixed or {}))

    @property
    def fields(self) -> list[str]:
        """Allowed names of hyperparameters without a prefix."""
        if isinstance(self.make, type):
            return list(fields_of(self.make)) if issubclass(self.make, Task) else []
        return list(inspect.signature(self.make).parameters)

    def resolve(self, values: Mapping[str, Any], **settings: Any) -> tuple[Task, RunConfig]:
        """The task and the settings of one trial.

        Args:
            values: of the trial: "lr" is a field of the task, "adam.lr" one of the model in its field adam, and
                "run.global_batch" a setting of the run. Numpy scalars become Python numbers.
            settings: of the run; they override `values` and `config`.

        Raises:
            ConfigError: a name is unknown, or a value is wrong.
        """
        check_keys(values, self.fields)
        plain = {key: value.item() if hasattr(value, "item") else value for key, value in values.items()}
        own = {key: value for key, value in plain.items() if not key.startswith(RUN_PREFIX)}
        run = {key.removeprefix(RUN_PREFIX): value for key, value in plain.items() if key.startswith(RUN_PREFIX)}
        return self.make(**self._fields(own)), RunConfig(**{**self.config.model_dump(), **run, **settings})

    def _fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """All fields of a trial's task, with values such as "adam.lr" put into the models in which they belong."""
        fields = {**self.fixed, **{name: value for name, value in values.items() if "." not in name}}
        for name in values.keys() - fields.keys():
            first, *path, last = name.split(".")
            inner = fields.get(first)
            if inner is None and isinstance(self.make, type) and issubclass(self.make, Task):
                default = self.make.model_fields[first].get_default(call_default_factory=True)
                inner = default if isinstance(default, BaseModel) else {}
            fields[first] = inner.model_dump() if isinstance(inner, BaseModel) else dict(inner or {})
            into = fields[first]
            for part in path:
                into = into.setdefault(part, {})
            into[last] = values[name]
        return fields


_templates: dict[bytes, TrialTemplate] = {}
"""Templates that were pickled or unpickled in this process.

Ray Tune unpickles a trainable in the driver, too. That would define a class of the user's script again, and pydantic would
read the script's source for it, from the current working directory.
"""


def pack(template: TrialTemplate) -> bytes:
    """Pickles a template."""
    pickle_by_value(template.make)
    data: bytes = cloudpickle.dumps(template)
    _templates[data] = template
    return data


def unpack(data: bytes) -> TrialTemplate:
    """Unpickles a template, once per process; returns the original where it was packed."""
    if data not in _templates:
        _templates[data] = cloudpickle.loads(data)
    return _templates[data]


@dataclass(frozen=True)
class SweepOptions:
    """What all trials of a sweep share besides the template.

    Args:
        policy: of the broker, "fair" or "best".
        max_workers: of all trials together; None for what there is room for.
        required_metric: a metric that every trial must report; "" for none.
    """

    policy: str = "fair"
    max_workers: int | None = None
    required_metric: str = ""


def trainable(task: Callable[..., Task], config: RunConfig | None = None) -> Callable[[dict[str, Any]], None]:
    """A trainable for `ray.tune.Tuner`, each of whose trials is an elastic run.

    Keys of the search space without a prefix are fields of the task, `run.` keys are settings of the run. Each trial
    reports its evaluations under their names (valid/loss), with `step`, `epoch` and `rows`, which count over the whole life
    of the trial, and its checkpoints by reference. A trial starts once there is room for its smallest number of workers;
    further workers go to the trials that have the fewest. Its run directory is `<run.storage>/<experiment>/<trial>`.

    Args:
        task: the class of the task, or a function that makes one of a trial's hyperparameters.
        config: settings of every run; `run.best` is the metric by which trials are ranked.

    Raises (the Tuner, before the first trial):
        ConfigError: a key is unknown, a value is wrong, or trials cannot share workers in place.
    """
    return as_trainable(TrialTemplate.of(task, config), SweepOptions())


def as_trainable(template: TrialTemplate, options: SweepOptions) -> Callable[[dict[str, Any]], None]:
    """A trainable for `ray.tune.Tuner`; see `trainable`."""
    check_elasticity(template.config)
    packed = pack(template)

    def trial(config: dict[str, Any]) -> None:
        run_trial(unpack(packed), options, config)

    trial.__mixins__ = (JoinRun,)  # type: ignore[attr-defined]
    with_resources: Callable[[dict[str, Any]], None] = tune.with_resources(trial, partial(smallest_group, packed))
    return with_resources


def smallest_group(packed: bytes, values: Mapping[str, Any]) -> tune.PlacementGroupFactory:
    """What Ray Tune reserves for a trial; called in the driver, once per trial, before the trial starts.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    _, config = unpack(packed).resolve(values)
    worker = worker_resources(config, choose_accelerator(config.accelerator))
    return tune.PlacementGroupFactory([HEAD, *[worker] * config.min_workers])


def check_elasticity(config: RunConfig) -> None:
    """Raises ConfigError if the settings, or this version of Ray, do not let trials share workers in place."""
    from raytrain.elastic.contract import CHECKED_ON, violations

    if config.spares:
        rule = "the trials of a sweep share workers, so none of them may keep some idle"
        raise ConfigError("run.spares", config.spares, rule, "leave run.spares out")
    found = violations()
    if config.elasticity != "restart" and not found:
        return
    raise ConfigError(
        "run.elasticity",
        "restart" if config.elasticity == "restart" else f"{config.elasticity}, with another Ray: {found[0]}",
        f"trials of a sweep share workers in place, as Ray {CHECKED_ON} allows",
        f"leave run.elasticity at auto, with Ray {CHECKED_ON}",
    )


class JoinRun:
    """Mixin for the class that Ray Tune makes of a function: the actor exits only after the run has ended."""

    thread: Thread | None = None
    """The thread of the trial that this process runs, or has run last."""

    def cleanup(self) -> None:
        super().cleanup()  # type: ignore[misc]  # raises SystemExit in the run's thread
        if JoinRun.thread is not None:
            Thread.join(JoinRun.thread, END_LIMIT_S)


def run_trial(
    template: TrialTemplate,
    options: SweepOptions,
    values: Mapping[str, Any],
    make_trainer: Callable[[Task, RunConfig, ResourceLease], Trainer] = Trainer,
) -> None:
    """Trains to the end, or until Ray Tune ends the trial, which raises SystemExit in `tune.report`.

    Raises what `Trainer.fit` raises, and:
        ConfigError: the trial does not report the sweep's metric, or clones a run whose steps train on other rows.
    """
    os.chdir(os.environ.get("TUNE_ORIG_WORKING_DIR", "."))  # Ray Tune has changed it
    JoinRun.thread = threading.current_thread()
    context = tune.get_context()
    sweep, name = context.get_experiment_name(), PurePath(context.get_trial_dir()).name
    task, config = template.resolve(values, storage=f"{template.config.storage}/{sweep}", name=name, resume="auto")
    lease = _lease(sweep, name, config, options)
    trainer, reference = make_trainer(task, config, lease), read_reference(tune.get_checkpoint())
    run_dir = trainer.run_dir
    known = 0 if reference is None else reference.step
    if reference is not None and (reference.storage, reference.name) != (config.storage, name):
        known = clone(reference, run_dir, config, values)
    reporter = Reporter(config, options.required_metric, lease, known)
    reporter.replay(run_dir)
    try:
        trainer.fit(reporter)
    except ResumeError:
        if reference is not None:
            raise
        delete_run(run_dir)  # of a trial that the driver was killed before saving
        trainer.fit(reporter)


def _lease(sweep: str, name: str, config: RunConfig, options: SweepOptions) -> ResourceLease:
    """The trial's part of the cluster: all bundles but the first are its smallest group's."""
    broker = broker_of(sweep, options.policy, config.best_mode, options.max_workers)
    bundles = tuple(range(1, 1 + config.min_workers))
    return ResourceLease(broker, f"{sweep}/{name}", ray.util.get_current_placement_group(), bundles)
