"""The command `raytrain`: one subcommand per module beside this one, its errors as texts and exit codes.

Commands import what they need when they run, so that `--help` is quick. Job scripts do not pass through here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_settings import CliApp, CliSettingsSource, CliSubCommand

from raytrain.cli.audit import Audit
from raytrain.cli.chaos import Chaos
from raytrain.cli.cluster import Cluster
from raytrain.cli.compare import Compare
from raytrain.cli.doctor import Doctor
from raytrain.cli.flags import flag_of
from raytrain.cli.ledger import LedgerCommand
from raytrain.cli.parser import CommandLine, Parser, exit_code, settings_source
from raytrain.cli.submit import Submit, split
from raytrain.config import Invalid
from raytrain.errors import ConfigError, RaytrainError


class App(CommandLine):
    """Elastic PyTorch training on Ray: workers come, go, and do not change the result.

    Training is started by a job script of yours (python jobs/digits.py --help).
    Here is what one does with its runs.
    """

    audit: CliSubCommand[Audit]
    """Prove that each row was trained on exactly once."""
    compare: CliSubCommand[Compare]
    """Show whether two runs came to the same result, to the last bit."""
    ledger: CliSubCommand[LedgerCommand]
    """Show where the time of a run went."""
    chaos: CliSubCommand[Chaos]
    """Disturb a run on purpose, to see what it survives."""
    cluster: CliSubCommand[Cluster]
    """Write or check the file that describes a cluster."""
    submit: CliSubCommand[Submit]
    """Run a job script on a cluster."""
    doctor: CliSubCommand[Doctor]
    """Check a cluster, or this machine, before a run."""

    def cli_cmd(self) -> None:
        CliApp.run_subcommand(self)


def run(argv: Sequence[str] | None = None) -> int:
    """Runs one command; its exit code: 0 done, 1 failed, 2 wrong use.

    Args:
        argv: arguments without the program's name; by default those of this process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    source = settings_source(App, prog="raytrain")
    if not arguments:
        sys.stderr.write(source.root_parser.format_help())
        return 2
    try:
        _run(arguments, source)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except (RaytrainError, KeyboardInterrupt) as error:
        sys.stderr.write(f"error: {error}\n" if isinstance(error, RaytrainError) else "stopped\n")
        return exit_code(error)
    return 0


def _run(arguments: list[str], source: CliSettingsSource[Parser]) -> None:
    given: dict[str, Any] = {}
    if arguments[0] == "submit":
        words, given["submit"] = split(arguments[1:])
        arguments = ["submit", *words]
    try:
        CliApp.run(App, arguments, cli_settings_source=source, **given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        *commands, flag = (step for step in first["loc"] if isinstance(step, str))
        cause = first.get("ctx", {}).get("error")
        rule = cause.rule if isinstance(cause, Invalid) else first["msg"][0].lower() + first["msg"][1:]
        raise ConfigError(flag_of(flag), first["input"], rule, f"see raytrain {' '.join(commands)} --help") from None
