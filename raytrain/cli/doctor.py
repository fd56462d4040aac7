"""`raytrain doctor`: would a run work on this cluster? Checks in seconds what a person would learn after an hour."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click
from pydantic import NonNegativeFloat, PositiveFloat

from raytrain.cli.flags import Command, number, option
from raytrain.errors import ConfigError, ResourceError
from raytrain.units import parse_range

if TYPE_CHECKING:
    from rich.console import Console

    from raytrain.cluster.doctor.verdicts import Row

REACH_S = 5.0
LIMIT = "Timeout of an all-reduce over all nodes; a node that does not answer within twice that time is skipped."


@click.command(cls=Command)
@option("--address", metavar="HOST:PORT", help="Head of the cluster, or auto for this machine's.  [default: RAY_ADDRESS]")
@option("--storage", metavar="PATH", default="./runs", help="As --run.storage.")
@option("--workers", metavar="MIN:MAX", help="As --run.workers: checks for CPUs for the smallest number.")
@option("--cpus-per-worker", type=number(PositiveFloat), metavar="X", default=1.0, help="As --run.cpus-per-worker.")
@option(
    "--min-disk", "min_disk_gib", type=number(NonNegativeFloat), metavar="GIB", default=1.0, help="Least free disk space."
)
@option("--limit", "limit_s", type=number(PositiveFloat), metavar="SECONDS", default=15.0, help=LIMIT)
@option("--json", "as_json", is_flag=True, help="Write the rows as JSON.")
def doctor(
    address: str | None,
    storage: str,
    workers: str | None,
    cpus_per_worker: float,
    min_disk_gib: float,
    limit_s: float,
    as_json: bool,
) -> int:
    """Check a cluster, or this machine, before a run.

    Checks nodes, packages, GPUs, storage, network, disks and limits. Each line is green, or red with the fix, or - if there
    is nothing to check. Actors without CPUs visit the nodes, so a busy cluster can be checked. The storage is written and
    read, and torch sums over all nodes, for a moment.

    Without an address it starts a Ray of its own on this machine. Check a cluster from one of its nodes:

    \b
      ray job submit --address http://HEAD:8265 -- raytrain doctor --storage s3://bucket/runs
      ray exec cluster.yaml 'raytrain doctor --address auto --storage s3://bucket/runs'

    Exit code: 0 all green, 1 some red, 2 wrong use.
    """
    from rich.console import Console

    console, began = Console(file=sys.stdout, highlight=False), time.monotonic()
    settings: dict[str, Any] = {
        "workers": _smallest(workers) if workers else 0,
        "cpus_per_worker": cpus_per_worker,
        "min_disk_bytes": min_disk_gib * 2**30,
        "timeout_s": limit_s,
    }
    if found := address or os.environ.get("RAY_ADDRESS"):
        check_address(found, "--address" if address else "RAY_ADDRESS")
        os.environ["RAY_ADDRESS"] = found
    with _progress(console, shown=not as_json) as progress:
        rows = _examine(storage, settings, progress)
    return _write(rows, time.monotonic() - began, console, as_json)


def _examine(storage: str, settings: dict[str, Any], progress: Callable[[str], None]) -> list[Row]:
    """Connects to Ray and examines its nodes."""
    progress("connecting to Ray")
    from raytrain.cluster.doctor.examine import DoctorConfig, examine
    from raytrain.elastic.environment import forwarded
    from raytrain.launch.cluster import connected
    from raytrain.launch.storage import absolute

    with connected():
        config = DoctorConfig(storage=absolute(storage), variables=forwarded(os.environ), on_progress=progress, **settings)
        return examine(config)


def _write(rows: list[Row], seconds: float, console: Console, as_json: bool) -> int:
    """Writes the table, or JSON; returns the exit code."""
    from raytrain.cluster.doctor.table import is_green, render, to_json

    if as_json:
        sys.stdout.write(json.dumps(to_json(rows, seconds), indent=1) + "\n")
    else:
        console.print(render(rows, seconds, console.width, console.encoding.startswith("utf")), soft_wrap=True)
    return 0 if is_green(rows) else 1


def check_address(address: str, where: str) -> None:
    """Reports at once what ray.init reports after a minute, or not clearly.

    Args:
        where: the flag or variable with the address.

    Raises:
        ConfigError: the address is of another kind.
        ResourceError: no process listens there.
    """
    if "://" in address:
        fix = f"run it there: ray job submit --address {address} -- raytrain doctor"
        if not address.startswith("http"):
            fix = "run it on a node: ray exec cluster.yaml 'raytrain doctor --address auto'"
        raise ConfigError(where, address, "is HOST:PORT of the head, as for ray start --address, or auto", fix)
    host, _, port = address.rpartition(":")
    if not port.isdigit():  # auto, local
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, OverflowError) as error:
        fix = "see ray status there; from outside the cluster use ray job submit"
        raise ResourceError(where, f"{address}: {error}", "is where a head of Ray listens", fix) from None


def _smallest(workers: str) -> int:
    """The smallest number of workers.

    Raises:
        ConfigError: the text is not a range.
    """
    try:
        smallest = parse_range(workers)[0]
    except ValueError:
        smallest = -1
    if smallest < 0:
        raise ConfigError("--workers", workers, "is a number, or a range min:max", "write it like: 4 or 4:64")
    return smallest


@contextlib.contextmanager
def _progress(console: Console, shown: bool) -> Iterator[Callable[[str], None]]:
    """A function that shows a terminal what happens now."""
    if not shown or not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield status.update
