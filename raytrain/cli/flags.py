"""How does an error name a setting? As `run.global_batch` in Python, and as the flag `--run.global-batch` in a shell.

Everything below says the former; a command line says the latter when it shows an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from raytrain.config import RunConfig

_SETTING = re.compile(r"(?<![\w.-])run\.([a-z][a-z0-9_]*)(?![\w(])")


def flag_of(name: str) -> str:
    """'run.global_batch' -> '--run.global-batch'."""
    return "--" + name.replace("_", "-")


def with_flags(text: str, fields: Iterable[str] = ()) -> str:
    """A text that names settings, with flags in their place; a line that is just the name of a field is one, too.

    Args:
        text: of an error.
        fields: names of the task's fields.
    """
    known = set(RunConfig.model_fields)

    def flag(found: re.Match[str]) -> str:
        return flag_of(found[0]) if found[1] in known else found[0]

    first, newline, rest = text.partition("\n")
    if first in set(fields):
        first = flag_of(first)
    return _SETTING.sub(flag, first + newline + rest)
