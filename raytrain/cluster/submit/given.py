"""Which environment variables does a job get from the shell that submits it? Names are told, values never.

They travel in the job's runtime_env, so that the driver and all workers have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from raytrain.elastic.variables import SUBMIT_DIRECTORY, forwarded
from raytrain.errors import ConfigError

FORWARD_ENV = "--run.forward-env"


def variables(
    environment: Mapping[str, str], asked: Sequence[str], arguments: Sequence[str], directory: str
) -> dict[str, str]:
    """The variables for a job: those of NCCL, gloo, PyTorch and OpenMP, those that the run forwards, and those of --env.

    Args:
        environment: of the shell.
        asked: of --env: NAME=VALUE, or NAME for the shell's own value.
        arguments: of the job; what --run.forward-env names is taken along if the shell has it.
        directory: where the shell is, for what is relative to it.

    Raises:
        ConfigError: a NAME is not set in the shell.
    """
    found = {SUBMIT_DIRECTORY: directory} | forwarded(environment, forward_env(arguments))
    for word in asked:
        name, equals, value = word.partition("=")
        if not name or (not equals and name not in environment):
            rule = "is NAME=VALUE, or the NAME of a variable that is set in this shell"
            raise ConfigError(
                "--env", name or "no name", rule, f"export {name or 'NAME'} first, or write {name or 'NAME'}=VALUE"
            )
        found[name] = value if equals else environment[name]
    return found


def forward_env(arguments: Sequence[str]) -> list[str]:
    """Names after --run.forward-env, written as `A,B` or `["A", "B"]`, in one word with the flag or in two."""
    names: list[str] = []
    for word, after in pairwise([*arguments, ""]):
        flag, equals, value = word.partition("=")
        if flag == FORWARD_ENV:
            names += (value if equals else after).strip("[]").split(",")
    return [stripped for name in names if (stripped := name.strip().strip("\"'"))]
