"""`raytrain.main`: a task as a command. Its fields and the settings of the run are flags; it shows the run and exits.

`--sweep.space.NAME TEXT` makes it a sweep over many trials. The names in a space are those of the task's fields, so they
are taken out before click reads the rest. Runs in the driver.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, overload

from pydantic import ValidationError, create_model

from raytrain.cli.flags import Command, Option, exit_code_of, flag_of, given_values, options_of, with_defaults
from raytrain.config import RunConfig, explain
from raytrain.errors import ConfigError
from raytrain.events.messages import count_of
from raytrain.sweep_config import SweepConfig
from raytrain.task import Task
from raytrain.tune.space import parse_space

if TYPE_CHECKING:
    from raytrain.events.view import RunView
    from raytrain.launch.trainer import Result, Trainer
    from raytrain.tune.results import SweepResult
    from raytrain.tune.sweep import Sweep

EITHER = ("epochs", "steps")
"""Settings of which one is given: a flag for one of them replaces a job's default for the other."""
OURS = ("run", "sweep", "help")
"""Flags of every job."""
SPACE = "--sweep.space."
SECTIONS = {
    "name": "Where the run is kept",
    "workers": "Workers, batch and length",
    "precision": "Numbers and devices",
    "checkpoint_every": "Checkpoints and evaluation",
    "max_failures": "Limits and records",
}
"""Sections of the help, each by the setting at which it begins."""
SWEEP = "A sweep over many trials"
SPACE_HELP = """What differs between trials; makes the job a sweep. Once for each NAME: a field (lr) or a setting
(run.global-batch). TEXT is log:1e-3:1, uniform:0:1 or 0:1, q:0:1:0.1 (multiples of 0.1), choice:32,64, grid:32,64 (each of
them in turn), or one value. Ranges of whole numbers include their upper end."""
EPILOG = """Exit code: 0 complete, 1 failed (of a sweep: any trial), 2 wrong settings or data, 130, 143 or 129 stopped by
Ctrl-C, SIGTERM or a closed terminal."""


class Order(NamedTuple):
    """What a command line asks for."""

    fields: dict[str, Any]
    """Given values of the task's fields, not yet validated."""
    config: RunConfig
    sweep: SweepConfig
    space: dict[str, Any]
    """Of a sweep, domains of Ray Tune by name; empty for one training."""


def main(task: type[Task], argv: Sequence[str] | None = None, **defaults: Any) -> NoReturn:
    """Runs a task, or a sweep over it, as the command line says, and exits.

    Exit codes: 0 complete (also if it was complete before), 1 failed (of a sweep: any trial), 2 wrong settings, data or
    storage, 130, 143 or 129 stopped by Ctrl-C, SIGTERM or SIGHUP (a closed terminal).

    Args:
        task: the task's class.
        argv: arguments without the program's name; by default those of this process.
        defaults: settings of the run (`RunConfig`) whose defaults differ in this job.
    """
    sys.exit(run(task, list(sys.argv[1:] if argv is None else argv), defaults))


def run(task: type[Task], argv: Sequence[str], defaults: Mapping[str, Any]) -> int:
    """As `main`, but returns the exit code."""

    def action() -> int:
        order = parse(task, argv, defaults)
        return _sweep(task, order) if order.space else _train(task(**order.fields), order.config)

    return exit_code_of(action, task.model_fields)


def parse(task: type[Task], argv: Sequence[str], defaults: Mapping[str, Any]) -> Order:
    """What a command line asks for.

    Args:
        task: the task's class.
        argv: arguments without the program's name.
        defaults: of the run's settings, for this job.

    Raises:
        ConfigError: a flag is unknown or its value is wrong, or the name of a task's field is a flag of every job.
        click.UsageError: a flag is unknown, or a required one is missing.
    """
    texts, others = split_space(argv)
    given = given_values(_command(task, defaults, texts).make_context(f"python {sys.argv[0]}", others))
    run, sweep = given.pop("run", {}), given.pop("sweep", {})
    config = RunConfig(**_without_replaced(defaults, [*run, *(name.removeprefix("run.") for name in texts)]) | run)
    settings = SweepConfig(**sweep)
    _check_space(texts, {*_names_in(given), *(f"run.{name}" for name in run)}, sweep)
    return Order(with_defaults(task, given), config, settings, parse_space(texts, task) if texts else {})


def _command(task: type[Task], defaults: Mapping[str, Any], searched: Collection[str]) -> Command:
    if taken := set(OURS) & task.model_fields.keys():
        rule = f"fields of a task are not named {', '.join(OURS[:-1])} or {OURS[-1]}, since those are flags of every job"
        raise ConfigError(f"{task.__name__}.{min(taken)}", "a field", rule, "give the field another name")
    options = [
        *options_of(task, {}, section=f"Task {task.__name__}", optional=searched),
        *options_of(RunConfig, defaults, ("run",), sections=SECTIONS),
        Option([f"{SPACE}NAME", "space"], metavar="TEXT", help=SPACE_HELP, section=SWEEP),
        *options_of(SweepConfig, {}, ("sweep",), section=SWEEP),
    ]
    return Command(
        None, params=options, help=task.__doc__, epilog=EPILOG, options_metavar="[--field VALUE] [--run.SETTING VALUE]"
    )


def _without_replaced(defaults: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """A job's defaults, without the number of epochs or steps if the command line gives the other one."""
    either = [name for name in EITHER if name in given]
    return {name: value for name, value in defaults.items() if name not in EITHER or len(either) != 1 or name in either}


def split_space(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The texts of a space by name ("lr", "run.global_batch"), and the other arguments.

    Raises:
        ConfigError: one of these flags has no text.
    """
    texts: dict[str, str] = {}
    others: list[str] = []
    words = iter(argv)
    for word in words:
        if not word.startswith(SPACE):
            others.append(word)
            continue
        flag, equals, text = word.partition("=")
        text = text if equals else next(words, "--")
        if text.startswith("--"):  # a single dash may begin a number
            raise ConfigError(flag, "not given", "is followed by a value", f"for example {flag} log:1e-3:1")
        texts[flag.removeprefix(SPACE).replace("-", "_")] = text
    return texts, others


def _names_in(given: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """{"adam": {"lr": "0.1"}} -> adam, adam.lr."""
    for name, value in given.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from _names_in(value, f"{prefix}{name}.")


def _check_space(names: Collection[str], given: Collection[str], sweep: Collection[str]) -> None:
    """Raises ConfigError where a value is given both by a flag and in the space, or a flag for sweeps has no space."""
    if sweep and not names:
        fix = f"add {SPACE}NAME, for example {SPACE}lr log:1e-3:1"
        flag = flag_of(f"sweep.{next(iter(sweep))}")
        raise ConfigError(flag, "given without a space", "a sweep varies at least one field or setting", fix)
    for name in names:
        if name in given:
            rule = "has one value for all trials, or those of the space"
            raise ConfigError(name, f"given, and sweep.space.{name} too", rule, "leave one of them out")


@overload
def show(run: Trainer) -> Result: ...
@overload
def show(run: Sweep) -> SweepResult: ...
def show(run: Trainer | Sweep) -> Result | SweepResult:
    """Runs a training or a sweep, and shows its progress on stdout; returns and raises what its `fit` does."""
    from raytrain.console.viewer import choose, choose_for_sweep
    from raytrain.launch.trainer import Trainer

    if isinstance(run, Trainer):
        with closing(choose(sys.stdout, sys.stderr, _view_before(run))) as viewer:
            return run.fit(viewer)
    with closing(choose_for_sweep(sys.stdout)) as sweep_viewer:
        return run.fit(sweep_viewer)


def _view_before(trainer: Trainer) -> RunView:
    from raytrain.events.log import read
    from raytrain.events.view import RunView, fold

    try:
        return fold(read(trainer.run_dir))
    except OSError:  # the storage cannot be used, as `fit` will say
        return RunView()


def _train(task: Task, config: RunConfig) -> int:
    from raytrain.launch.monitor import exit_on_signals
    from raytrain.launch.trainer import Trainer

    with exit_on_signals():  # Ray, which is imported by now, has handlers that exit with other codes
        result = show(Trainer(task, config))
    if result.outcome == "already complete":
        sys.stdout.write(f"{result.name}: already complete, {result.step} steps in {result.directory}\n")
    return 128 + result.stopped_by if result.stopped_by else 0


def _sweep(task: type[Task], order: Order) -> int:
    from raytrain.launch.monitor import exit_on_signals
    from raytrain.tune.sweep import Sweep

    fixed = _fixed_fields(task, order)
    with exit_on_signals():  # as above
        result = show(Sweep(task, order.space, config=order.config, sweep=order.sweep, fixed=fixed))
    if result.outcome == "already complete":
        trials = count_of(len(result.view.trials), "trial")
        sys.stdout.write(f"{result.name}: already complete, {trials} in {result.directory}\n")
    if result.stopped_by:
        return 128 + result.stopped_by
    return 1 if result.num_failed else 0


def _fixed_fields(task: type[Task], order: Order) -> dict[str, Any]:
    """Values of the fields that are not in the space: validated, but for a model of which a part is in the space.

    Raises:
        ConfigError: a value is wrong.
    """
    searched = {name.partition(".")[0] for name in order.space}
    fields: Any = {name: (field.annotation, field) for name, field in task.model_fields.items() if name not in searched}
    try:
        values = create_model(task.__name__, **fields)(
            **{name: order.fields[name] for name in order.fields if name in fields}
        )
    except ValidationError as error:
        raise explain(error, task) from None
    partly = {name: value for name, value in order.fields.items() if name in searched}
    return {**partly, **{name: getattr(values, name) for name in fields}}
