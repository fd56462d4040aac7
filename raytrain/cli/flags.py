"""How does an error name a setting? As `run.global_batch` in Python, and as the flag `--run.global-batch` in a shell.

Everything below says the former; a command line says the latter when it shows an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from raytrain.config import RunConfig
from raytrain.sweep_config import SweepConfig

_SETTING = re.compile(r"(?<![\w.-])(?:sweep\.space\.(?:run\.)?\w+|(?:run|sweep)\.[a-z][a-z0-9_]*)(?![\w(])")
_KNOWN = {*(f"run.{name}" for name in RunConfig.model_fields), *(f"sweep.{name}" for name in SweepConfig.model_fields)}


def flag_of(name: str) -> str:
    """'run.global_batch' -> '--run.global-batch'."""
    return "--" + name.replace("_", "-")


def is_given(name: str, argv: Sequence[str]) -> bool:
    """Whether a setting's flag is among the arguments: `--run.steps 3`, `--run.steps=3`, `--no-run.audit`."""
    flag = flag_of(name)
    return not {flag, flag.replace("--", "--no-", 1)}.isdisjoint(word.partition("=")[0] for word in argv)


def with_flags(text: str, fields: Iterable[str] = ()) -> str:
    """A text that names settings, with flags in their place; a line that is just the name of a field is one, too.

    Args:
        text: of an error.
        fields: names of the task's fields.
    """

    def flag(found: re.Match[str]) -> str:
        is_setting = found[0] in _KNOWN or found[0].startswith("sweep.space.")
        return flag_of(found[0]) if is_setting else found[0]

    first, newline, rest = text.partition("\n")
    if first in set(fields):
        first = flag_of(first)
    return _SETTING.sub(flag, first + newline + rest)
