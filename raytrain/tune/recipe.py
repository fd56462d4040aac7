"""What does a trial of a sweep train? The task and the settings that its values stand for.

A value without a prefix is a field of the task, or a parameter of the function that makes it; `run.` goes before a setting
of the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray import cloudpickle

from raytrain.config import RunConfig
from raytrain.launch.storage import absolute
from raytrain.task import Task
from raytrain.tune.space import check_keys

RUN = "run."


@dataclass(frozen=True)
class Recipe:
    """Makes the task and the settings of a trial.

    Args:
        make: the class of the task, or a function that makes one.
        config: the settings of every trial; its storage is made absolute where the recipe is made.
        fixed: fields of the task, or parameters of the function, that are the same in every trial.
    """

    make: Callable[..., Task]
    config: RunConfig
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> list[str]:
        """What a value without a prefix may be called."""
        if isinstance(self.make, type):
            return list(self.make.model_fields) if issubclass(self.make, Task) else []
        return list(inspect.signature(self.make).parameters)

    def resolve(self, values: Mapping[str, Any], **settings: Any) -> tuple[Task, RunConfig]:
        """The task and the settings of one trial.

        Args:
            values: of the trial, by key; numpy scalars become numbers.
            settings: of the run, that are neither in the values nor in `config`.

        Raises:
            ConfigError: a key is unknown, or a value is wrong.
        """
        check_keys(values, self.fields)
        plain = {key: value.item() if hasattr(value, "item") else value for key, value in values.items()}
        own = {key: value for key, value in plain.items() if not key.startswith(RUN)}
        run = {key.removeprefix(RUN): value for key, value in plain.items() if key.startswith(RUN)}
        return self.make(**{**self.fixed, **own}), RunConfig(**{**self.config.model_dump(), **run, **settings})


@dataclass(frozen=True)
class Packed:
    """A recipe on its way to other processes; opened in this one, it is the recipe that was packed.

    Ray Tune unpickles in the driver what it sends to trials. A class that was defined in a script would be made anew by
    that, for which pydantic reads the script's source again, from wherever the program is at that moment.
    """

    data: bytes

    def open(self) -> Recipe:
        if self.data not in _opened:
            _opened[self.data] = cloudpickle.loads(self.data)
        return _opened[self.data]

    @classmethod
    def of(cls, made: Recipe) -> Packed:
        data = cloudpickle.dumps(made)
        _opened[data] = made
        return cls(data)


_opened: dict[bytes, Recipe] = {}
"""What was packed or opened in this process."""


def recipe(make: Callable[..., Task], config: RunConfig | None, fixed: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of a task's class, or of a function that makes tasks; see `Recipe`."""
    config = config or RunConfig()
    return Recipe(make, RunConfig(**config.model_dump() | {"storage": absolute(config.storage)}), dict(fixed or {}))
