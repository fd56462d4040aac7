"""`raytrain.main`: a task as a command. Its fields and the run's settings are the flags; it shows the run and exits.

With a search space it runs a sweep instead (`cli/sweep.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from pydantic import ValidationError, create_model
from pydantic_settings import CliApp, SettingsConfigDict

from raytrain.cli.flags import is_given, with_flags
from raytrain.cli.help import arrange
from raytrain.cli.parser import CommandLine, exit_code, settings_source
from raytrain.cli.sweep import check_space, run_sweep, split_space
from raytrain.config import RunConfig, explain
from raytrain.errors import ConfigError, RaytrainError, TaskError
from raytrain.sweep_config import SweepConfig
from raytrain.task import Task
from raytrain.tune.space import parse_space

if TYPE_CHECKING:
    from raytrain.launch.result import Result
    from raytrain.launch.trainer import Trainer

EITHER = ("epochs", "steps")
"""Settings of which one is given: a flag for one of them makes a job's default for the other give way."""
OURS = ("run", "sweep", "help")
"""Flags of every job."""


class Command(NamedTuple):
    """What a command line asks for."""

    fields: dict[str, Any]
    """Values of the task's fields, but for those in the space."""
    config: RunConfig
    sweep: SweepConfig
    space: dict[str, Any]
    """Of a sweep, domains of Ray Tune by name; empty for one training."""


def main(task: type[Task], argv: Sequence[str] | None = None, **defaults: Any) -> NoReturn:
    """Runs a task, or a sweep over it, as the command line says, and exits.

    Exit codes: 0 complete (also when it was before), 1 failed (of a sweep: any trial), 2 wrong settings, data or storage,
    130 or 143 stopped by Ctrl-C or SIGTERM.

    Args:
        task: the task's class.
        argv: arguments without the program's name; by default those of this process.
        defaults: settings of the run (`RunConfig`) that this job has other defaults for.
    """
    sys.exit(run(task, list(sys.argv[1:] if argv is None else argv), defaults))


def run(task: type[Task], argv: Sequence[str], defaults: dict[str, Any]) -> int:
    """As `main`, but returns the exit code."""
    try:
        fields, config, sweep, space = parse(task, argv, RunConfig(**defaults))
        return run_sweep(task, space, config, sweep, fields) if space else _train(task(**fields), config)
    except SystemExit as end:  # of --help, or by SIGTERM before the run listens to it
        return end.code if isinstance(end.code, int) else 0
    except (RaytrainError, KeyboardInterrupt) as error:
        sys.stderr.write(error_text(error, task))
        return exit_code(error)


def error_text(error: BaseException, task: type[Task]) -> str:
    """What is written to stderr: a traceback of the task's code first, then one line or four parts."""
    if isinstance(error, TaskError) and error.traceback.startswith("Traceback"):
        return f"{error.traceback.rstrip()}\nerror: raised by {error.where}\n"
    if isinstance(error, TaskError):
        return f"error: {error.traceback}\n"
    if isinstance(error, RaytrainError):
        return f"error: {with_flags(str(error), task.model_fields)}\n"
    return "stopped\n"


def parse(task: type[Task], argv: Sequence[str], defaults: RunConfig) -> Command:
    """What a command line asks for.

    Raises:
        ConfigError: a flag is unknown or its value is wrong, or the task has a field whose flag would be ours.
    """
    texts, others = split_space(argv)
    given = [name for name in EITHER if is_given(f"run.{name}", others) or f"run.{name}" in texts]
    if len(given) == 1:
        defaults = RunConfig(**defaults.model_dump() | {name: None for name in EITHER if name not in given})
    model = _model(task, defaults, texts)
    source = settings_source(model, prog=f"python {sys.argv[0]}")
    arrange(source.root_parser, task, defaults)
    try:
        values: Any = CliApp.run(model, others, cli_settings_source=source)
    except ValidationError as error:
        raise explain(error, task) from None
    check_space(texts, others)
    fields = {name: getattr(values, name) for name in task.model_fields if name not in texts}
    return Command(fields, values.run, values.sweep, parse_space(texts, task) if texts else {})


def _model(task: type[Task], defaults: RunConfig, optional: Collection[str]) -> type[CommandLine]:
    """What the parser reads: the task's fields, `run` and `sweep`; the fields named in `optional` may be left out."""
    if taken := set(OURS) & task.model_fields.keys():
        rule = f"fields of a task are not named {', '.join(OURS[:-1])} or {OURS[-1]}, since those are flags of every job"
        raise ConfigError(f"{task.__name__}.{min(taken)}", "a field", rule, "give the field another name")
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in task.model_fields.items()}
    fields |= {name: (fields[name][0] | None, None) for name in fields if name in optional and fields[name][1].is_required()}
    fields |= {"run": (RunConfig, defaults), "sweep": (SweepConfig, SweepConfig())}
    model = create_model(task.__name__, __base__=CommandLine, __doc__=task.__doc__, **fields)
    model.model_config |= SettingsConfigDict(cli_kebab_case=True, nested_model_default_partial_update=True)
    return model


def _train(task: Task, config: RunConfig) -> int:
    from raytrain.launch.stopping import exit_on_sigterm
    from raytrain.launch.trainer import Trainer

    with exit_on_sigterm():  # Ray, which is imported by now, has a handler that exits with another code
        result = _shown(Trainer(task, config))
    if result.outcome == "already complete":
        sys.stdout.write(f"{result.name}: already complete, {result.step} steps in {result.directory}\n")
    return 128 + result.stopped_by if result.stopped_by else 0


def _shown(trainer: Trainer) -> Result:
    """Trains, and shows it on stdout."""
    from raytrain.console.viewer import choose
    from raytrain.events.log import read
    from raytrain.events.view import RunView, fold

    try:
        before = fold(read(trainer.run_dir))
    except OSError:  # the storage is of no use, as `fit` will say
        before = RunView()
    viewer = choose(sys.stdout, sys.stderr, before)
    try:
        return trainer.fit(viewer)
    finally:
        viewer.close()
