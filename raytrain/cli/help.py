"""How does the help of a job read? The task's fields first, then the run's settings by subject, as a user types them.

Changes what pydantic-settings wrote into the parser: short names of values, and defaults only where there are any.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from raytrain.cli.parser import Parser
from raytrain.config import RunConfig
from raytrain.sweep_config import SweepConfig
from raytrain.task import Task
from raytrain.tune.space import kinds_of

SUBJECTS = {
    "name": "where the run is kept",
    "workers": "workers, batch and length",
    "precision": "numbers and devices",
    "checkpoint_every": "checkpoints and evaluation",
    "max_failures": "limits and records",
}
"""Titles of the help's sections, each with the setting at which it begins."""

SWEEP = "a sweep over many trials"
SPACE = """What differs between trials, which makes the job a sweep; once for each NAME: a field (lr) or a setting
(run.global-batch). TEXT is log:1e-3:1, uniform:0:1 or 0:1, q:0:1:0.1 (multiples of 0.1), choice:32,64, grid:32,64 (each of
them in turn), or one value. Ranges of whole numbers include their upper end."""

EPILOG = """Exit code: 0 complete, 1 failed (of a sweep: any trial), 2 wrong settings or
data, 130 or 143 stopped by Ctrl-C or SIGTERM."""


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
    space = parser.add_argument("--sweep.space.NAME", metavar="TEXT", default=argparse.SUPPRESS, help=SPACE)
    parser.sections[SWEEP] = [space]
    for name, field in SweepConfig.model_fields.items():
        _word(by_name[f"sweep.{name}"], field, field.get_default())
        parser.sections[SWEEP].append(by_name[f"sweep.{name}"])


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
    """What stands for a value: 'N', 'X', 'TEXT', 'MIN:MAX' or '{min,max}'; '' for what has no such name."""
    kinds = kinds_of(field.annotation)
    if get_origin(kinds[0]) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(kinds[0]) if choice != "") + "}"
    names: dict[Any, str] = {int: "N", float: "X", str: "TEXT", tuple[int, int]: "MIN:MAX"}
    return names.get(kinds[0], "") if len(kinds) == 1 else ""
