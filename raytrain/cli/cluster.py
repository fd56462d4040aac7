"""`raytrain cluster`: will this cluster file give the cluster that a run needs? Writes one, and checks one, both offline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from raytrain.cli.flags import Argument, Group, flag_of, given_values, option, options_of, rule_of, see_help
from raytrain.cluster.file.spec import ClusterSpec
from raytrain.errors import ConfigError
from raytrain.units import parse_range


@click.group(cls=Group)
def cluster() -> None:
    """Write or check the file that describes a cluster."""


@cluster.command(params=[*options_of(ClusterSpec, {})])
@option("--out", metavar="PATH", help="File to write instead of stdout.")
@click.pass_context
def render(ctx: click.Context, /, out: str | None, **_: Any) -> None:
    """Write a cluster file for AWS, GCP, Azure, Kubernetes or machines of your own.

    Writes a file for `ray up`, or manifests for `kubectl apply`, to stdout. The head never trains; workers are spot machines
    with GPUs, except on machines of your own. Ray's token authentication is on. Comments in the file say what to edit and
    how to use it.
    """
    from raytrain.cluster.file.render import render

    try:
        spec = ClusterSpec(**given_values(ctx))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(flag_of(str(first["loc"][0])), first["input"], rule_of(error), see_help(ctx)) from None
    text = render(spec)
    if out is None:
        sys.stdout.write(text)
        return
    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--out", out, f"can be written ({error})", "give another path") from None


@cluster.command()
@click.argument("file", cls=Argument, line="The cluster file.")
@option("--workers", metavar="MIN:MAX", help="Workers of a run, as --run.workers: checks whether they fit.")
def check(file: str, workers: str | None) -> int:
    """List all mistakes in a cluster file, each with its line and its fix; needs no cloud and no network.

    Checks files of `ray up` and Kubernetes manifests. Run it where you would run `ray up`: it checks that the files to copy
    exist.

    Exit code: 0 no mistakes, 1 some mistakes, 2 wrong use.
    """
    from raytrain.cluster.file.checks import mistakes
    from raytrain.cluster.file.document import facts_of_this_machine

    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("FILE", file, f"is a text file ({error})", "give the path of one") from None
    found = mistakes(text, facts_of_this_machine(Path.cwd(), _range(workers) if workers else None))
    count = {0: "no mistakes", 1: "1 mistake"}.get(len(found), f"{len(found)} mistakes")
    sys.stdout.write("\n".join([*(mistake.text(file) for mistake in found), count]) + "\n")
    return 1 if found else 0


def _range(workers: str) -> tuple[int, int]:
    try:
        low, high = parse_range(workers)
    except ValueError:
        low, high = 0, 0
    if not 1 <= low <= high:
        raise ConfigError("--workers", workers, "is min:max, at least 1", "write it like 4:64")
    return low, high
