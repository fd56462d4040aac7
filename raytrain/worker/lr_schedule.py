"""When does a learning rate schedule advance? After each step, each epoch, or each evaluation.

The answer depends on the step number and on global metrics alone, so it is the same on all ranks and after a resume. Runs in
the worker's training thread.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raytrain.config import RunConfig
from raytrain.errors import ConfigError
from raytrain.rendezvous.state import NO_STATE

STEP, EPOCH, EVALUATION = "step", "epoch", "evaluation"

_KEYS = ("scheduler", "interval", "frequency", "monitor", "name", "strict", "reduce_on_plateau")
"""Of Lightning's dictionary; the last three mean nothing here."""
_METHODS = ("step", "state_dict", "load_state_dict")
_FORMS = (
    "a scheduler of torch.optim.lr_scheduler, stepped after each optimizer step; a ReduceLROnPlateau, stepped after each "
    'evaluation; or {"scheduler": ..., "interval": "epoch" or "step", "frequency": n}'
)


@dataclass
class LRSchedule:
    """A scheduler, and when it is stepped.

    Args:
        scheduler: PyTorch's object; its state is saved with the run's.
        interval: STEP, EPOCH or EVALUATION.
        frequency: it is stepped every so many steps or epochs.
        steps_per_epoch: of the training data.
        metric: after an evaluation, the scheduler gets this metric, for example "valid/loss".
    """

    scheduler: Any
    interval: str = STEP
    frequency: int = 1
    steps_per_epoch: int = 1
    metric: str = ""

    @property
    def period(self) -> int:
        """Optimizer steps from one advance to the next."""
        return self.frequency * (self.steps_per_epoch if self.interval == EPOCH else 1)

    def finish_step(self, step: int, applied: bool) -> None:
        """Advances the schedule if that is due after `step` finished steps, the last of which was applied or skipped.

        A skipped step is none for a schedule per step; an epoch ends in any case.
        """
        if self.interval != EVALUATION and step % self.period == 0 and (applied or self.interval == EPOCH):
            self.scheduler.step()

    def finish_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Gives the metric of an evaluation after `step` finished steps to the scheduler, once.

        The step is an attribute of the scheduler, and so part of its saved state: a checkpoint may have been taken before.
        """
        if self.interval == EVALUATION and getattr(self.scheduler, "evaluated_step", NO_STATE) != step:
            self.scheduler.step(metrics[self.metric])
            self.scheduler.evaluated_step = step

    def advance_to(self, step: int) -> None:
        """Moves a new schedule, with the learning rates of its optimizer, to where it is after `step` steps.

        One that depends on evaluations stays as it is.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")  # the optimizer made no step
            for _ in range(step // self.period if self.interval != EVALUATION else 0):
                self.scheduler.step()


def build_lr_schedule(
    where: str, returned: Any, optimizer: Optimizer, config: RunConfig, steps_per_epoch: int, eval_names: list[str]
) -> LRSchedule | None:
    """The schedule that the hook `scheduler` returned.

    Args:
        where: the hook, for errors.

    Raises:
        ConfigError: it is nothing that can be stepped.
    """
    if returned is None:
        return None
    given = returned if isinstance(returned, Mapping) else {"scheduler": returned}
    if unknown := [key for key in given if key not in _KEYS]:
        near = difflib.get_close_matches(str(unknown[0]), _KEYS, n=1)
        raise ConfigError(where, f"a dict with {unknown[0]!r}", f"returns {_FORMS}", f"did you mean {(near or _KEYS)[0]!r}?")
    scheduler, frequency = given.get("scheduler"), given.get("frequency", 1)
    _check_scheduler(where, scheduler, optimizer)
    if not isinstance(frequency, int) or frequency < 1:
        raise ConfigError(where, f"frequency {frequency!r}", "a whole number of at least 1", "for example 1")
    if isinstance(scheduler, ReduceLROnPlateau):
        metric = given.get("monitor", config.best_metric)
        _check_plateau(where, scheduler, given, config, metric, eval_names)
        return LRSchedule(scheduler, EVALUATION, 1, steps_per_epoch, metric)
    interval = given.get("interval", EPOCH if given is returned else STEP)  # as in Lightning
    if interval not in (STEP, EPOCH):
        raise ConfigError(where, f"interval {interval!r}", f"is {STEP!r} or {EPOCH!r}", f"returns {_FORMS}")
    return LRSchedule(scheduler, interval, frequency, steps_per_epoch)


def _check_scheduler(where: str, scheduler: Any, optimizer: Optimizer) -> None:
    kind = type(scheduler).__name__
    if isinstance(scheduler, list | tuple):
        fix = "return one; SequentialLR and ChainedScheduler make one of several"
        raise ConfigError(where, f"a {kind} of {len(scheduler)} schedulers", f"returns {_FORMS}", fix)
    if missing := [name for name in _METHODS if not callable(getattr(scheduler, name, None))]:
        raise ConfigError(where, f"a {kind}, which has no {missing[0]}()", f"returns {_FORMS}", "return one of these")
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        fix = "build the scheduler with the optimizer that the hook gets"
        raise ConfigError(where, f"a {kind} of another optimizer", "its optimizer is the task's", fix)
    required = required_arguments(scheduler.step)
    if required and not isinstance(scheduler, ReduceLROnPlateau):
        value = f"a {kind}, whose step() needs {', '.join(required)}"
        raise ConfigError(
            where, value, f"returns {_FORMS}", "use one whose step() needs no argument, or a ReduceLROnPlateau"
        )


def _check_plateau(
    where: str, scheduler: ReduceLROnPlateau, given: Mapping[str, Any], config: RunConfig, metric: str, eval_names: list[str]
) -> None:
    value = f"a ReduceLROnPlateau with mode {scheduler.mode!r}"
    if not eval_names:
        rule = "it is stepped after each evaluation"
        raise ConfigError(where, value, rule, "let `data` return another source besides train, or use another scheduler")
    if metric == config.best_metric and scheduler.mode != config.best_mode:
        rule = f"it gets the metric of run.best, {config.best}"
        raise ConfigError(
            where, value, rule, f"set its mode to {config.best_mode!r}, or run.best to {scheduler.mode}:{metric}"
        )
    if given.get("frequency", 1) != 1 or given.get("interval", EPOCH) != EPOCH:
        value += f", interval {given.get('interval', EPOCH)!r} and frequency {given.get('frequency', 1)}"
        raise ConfigError(where, value, "it is stepped after each evaluation", "leave both out, and set run.eval_every")


def required_arguments(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments that a call needs."""
    parameters = inspect.signature(function).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is inspect.Parameter.empty and each.kind not in variadic]
