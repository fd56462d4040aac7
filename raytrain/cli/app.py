"""The command `raytrain`: one subcommand per question. Job scripts do not pass through here.

Commands import torch and ray when they run, so that `--help` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from raytrain.cli.chaos import chaos
from raytrain.cli.cluster import cluster
from raytrain.cli.doctor import doctor
from raytrain.cli.flags import Group, exit_code_of
from raytrain.cli.reports import audit, compare, ledger
from raytrain.cli.submit import submit


@click.group(cls=Group, commands=[audit, compare, ledger, chaos, cluster, submit, doctor])
def app() -> None:
    """Elastic PyTorch training on Ray: workers come and go, and the result does not change.

    A job script of yours starts the training (python jobs/digits.py --help). These commands inspect its runs, and prepare,
    check and use clusters.
    """


def run(argv: Sequence[str] | None = None) -> int:
    """Runs one command; its exit code: 0 done, 1 failed, 2 wrong use.

    Args:
        argv: arguments without the program's name; by default those of this process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        sys.stderr.write(app.get_help(click.Context(app, info_name="raytrain", **app.context_settings)) + "\n")
        return 2
    return exit_code_of(lambda: app.main(arguments, prog_name="raytrain", standalone_mode=False))
