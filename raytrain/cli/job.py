"""`raytrain.main`: a task as a command. Its fields and the run's settings are the flags; it shows the run and exits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import ValidationError, create_model
from pydantic_settings import CliApp, SettingsConfigDict

from raytrain.cli.flags import with_flags
from raytrain.cli.help import arrange
from raytrain.cli.parser import CommandLine, exit_code, settings_source
from raytrain.config import RunConfig, explain
from raytrain.errors import ConfigError, RaytrainError, TaskError
from raytrain.task import Task

if TYPE_CHECKING:
    from raytrain.launch.result import Result
    from raytrain.launch.trainer import Trainer

EITHER = ("epochs", "steps")
"""Settings of which one is given: a flag for one of them makes a job's default for the other give way."""


def main(task: type[Task], argv: Sequence[str] | None = None, **defaults: Any) -> NoReturn:
    """Runs a task as the command line says, and exits.

    Exit codes: 0 complete (also when it was before), 1 failed, 2 wrong settings, data or storage, 130 or 143 stopped by
    Ctrl-C or SIGTERM.

    Args:
        task: the task's class.
        argv: arguments without the program's name; by default those of this process.
        defaults: settings of the run (`RunConfig`) that this job has other defaults for.
    """
    sys.exit(run(task, list(sys.argv[1:] if argv is None else argv), defaults))


def run(task: type[Task], argv: Sequence[str], defaults: dict[str, Any]) -> int:
    """As `main`, but returns the exit code."""
    try:
        chosen, config = parse(task, argv, RunConfig(**defaults))
        return _train(chosen, config)
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


def parse(task: type[Task], argv: Sequence[str], defaults: RunConfig) -> tuple[Task, RunConfig]:
    """The task and the settings that a command line describes.

    Raises:
        ConfigError: a flag is unknown or its value is wrong, or the task has a field whose flag would be ours.
    """
    given = [name for name in EITHER if any(word.split("=")[0] == f"--run.{name}" for word in argv)]
    if len(given) == 1:
        defaults = RunConfig(**defaults.model_dump() | {name: None for name in EITHER if name not in given})
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in task.model_fields.items()}
    if taken := {"run", "help"} & fields.keys():
        rule = "fields of a task are named neither run nor help, since those are flags of every job"
        raise ConfigError(f"{task.__name__}.{min(taken)}", "a field", rule, "give the field another name")
    model = create_model(task.__name__, __base__=CommandLine, __doc__=task.__doc__, run=(RunConfig, defaults), **fields)
    model.model_config |= SettingsConfigDict(cli_kebab_case=True, nested_model_default_partial_update=True)
    source = settings_source(model, prog=f"python {sys.argv[0]}")
    arrange(source.root_parser, task, defaults)
    try:
        values = CliApp.run(model, list(argv), cli_settings_source=source)
    except ValidationError as error:
        raise explain(error, task) from None
    config: RunConfig = getattr(values, "run")  # noqa: B009 - a field that mypy cannot know
    return task(**{name: getattr(values, name) for name in fields}), config


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
