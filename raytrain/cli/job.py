"""`raytrain.main`: a task as a command. Its fields and the run's settings are the flags; it shows the run and exits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from pydantic import ValidationError, create_model
from pydantic_settings import CliApp, SettingsConfigDict

from raytrain.cli.parser import CommandLine, exit_code, settings_source
from raytrain.config import RunConfig, explain
from raytrain.errors import RaytrainError
from raytrain.task import Task


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
    except SystemExit as end:  # of --help
        return end.code if isinstance(end.code, int) else 0
    except (RaytrainError, KeyboardInterrupt) as error:
        sys.stderr.write(f"error: {error}\n" if isinstance(error, RaytrainError) else "stopped\n")
        return exit_code(error)


def parse(task: type[Task], argv: Sequence[str], defaults: RunConfig) -> tuple[Task, RunConfig]:
    """The task and the settings that a command line describes.

    Raises:
        ConfigError: a flag is unknown or its value is wrong.
    """
    if _gives(argv, "--run.steps") and not _gives(argv, "--run.epochs"):
        defaults = RunConfig(**defaults.model_dump() | {"epochs": None})  # the job's default gives way
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in task.model_fields.items()}
    model = create_model(task.__name__, __base__=CommandLine, __doc__=task.__doc__, run=(RunConfig, defaults), **fields)
    model.model_config |= SettingsConfigDict(cli_kebab_case=True, nested_model_default_partial_update=True)
    try:
        values = CliApp.run(model, list(argv), cli_settings_source=settings_source(model, sys.argv[0]))
    except ValidationError as error:
        raise explain(error, task) from None
    config: RunConfig = getattr(values, "run")  # noqa: B009 - a field that mypy cannot know
    return task(**{name: getattr(values, name) for name in fields}), config


def _gives(argv: Sequence[str], flag: str) -> bool:
    return any(argument == flag or argument.startswith(flag + "=") for argument in argv)


def _train(task: Task, config: RunConfig) -> int:
    from raytrain.console.viewer import choose
    from raytrain.events.log import read
    from raytrain.events.view import fold
    from raytrain.launch.trainer import Trainer

    trainer = Trainer(task, config)
    viewer = choose(sys.stdout, sys.stderr, fold(read(trainer.run_dir)))
    try:
        result = trainer.fit(viewer)
    finally:
        viewer.close()
    if result.outcome == "already complete":
        sys.stdout.write(f"{result.name}: already complete, {result.step} steps in {result.directory}\n")
    return 128 + result.stopped_by if result.stopped_by else 0
