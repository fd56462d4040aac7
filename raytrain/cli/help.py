"""How does the help of a job read? The task's fields first, then the run's settings by subject, as a user types them.

Changes what pydantic-settings wrote into the parser: short names of values, and defaults only where there are any.
"""

from __future__ import annotations

import argparse
from functools import partial
from types import NoneType
from typing import Any, get_args

from pydantic.fields import FieldInfo

from raytrain.cli.parser import Parser
from raytrain.config import RunConfig
from raytrain.task import Task

SUBJECTS = {
    "name": "where the run is kept",
    "workers": "workers, batch and length",
    "precision": "numbers and devices",
    "checkpoint_every": "checkpoints and evaluation",
    "max_failures": "limits and records",
}
"""Titles of the help's sections, each with the setting at which it begins."""

EPILOG = """Exit code: 0 complete, 1 failed, 2 wrong settings or data, 130 or 143 stopped by
Ctrl-C or SIGTERM."""


def arrange(parser: Parser, task: type[Task], defaults: RunConfig) -> None:
    """Gives the parser of a job its sections, and each flag its words."""
    parser.usage = "%(prog)s [--field value] [--run.setting value]"
    parser.epilog = EPILOG
    parser.formatter_class = partial(argparse.RawDescriptionHelpFormatter, max_help_position=32)
    by_name = {action.dest: action for action in parser._actions}
    title = f"task {task.__name__}"
    parser.sections[title] = []
    for name, field in task.model_fields.items():
        _word(by_name[name], field, "required" if field.is_required() else field.get_default(call_default_factory=True))
        parser.sections[title].append(by_name[name])
    parser.sections[title].append(by_name["help"])
    for name, field in RunConfig.model_fields.items():
        title = SUBJECTS.get(name, title)
        _word(by_name[f"run.{name}"], field, getattr(defaults, name))
        parser.sections.setdefault(title, []).append(by_name[f"run.{name}"])


def typed(value: Any) -> str:
    """A default as a user would type it: (1, 2) -> '1:2', 60.0 -> '60'; '' for none."""
    if value is None or value is False:
        return ""
    if isinstance(value, tuple):
        return ":".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _word(action: argparse.Action, field: FieldInfo, default: Any) -> None:
    if not isinstance(action, argparse.BooleanOptionalAction):
        action.metavar = _placeholder(field) or action.metavar
    shown = typed(default)
    told = {"": "", "required": "(required)", "True": "(default: yes)"}.get(shown, f"(default: {shown})")
    action.help = f"{field.description or ''} {told}".strip().replace("%", "%%")


def _placeholder(field: FieldInfo) -> str:
    """What stands for a value: 'N', 'X', 'TEXT' or 'MIN:MAX'; '' where the choices say more."""
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not NoneType]
    if field.annotation == tuple[int, int]:
        return "MIN:MAX"
    names: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}
    return names.get(kinds[0], "") if len(kinds) == 1 else ""
