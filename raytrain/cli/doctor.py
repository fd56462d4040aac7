"""`raytrain doctor`: would a run work on this cluster? Checks in seconds what a person would learn after an hour."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import CliToggleFlag

from raytrain.errors import ConfigError, ResourceError
from raytrain.units import parse_range

if TYPE_CHECKING:
    from rich.console import Console

    from raytrain.cluster.doctor.facts import Row

REACH_S = 5.0


class Doctor(BaseModel):
    """Check the cluster, or this machine, before a run: nodes, packages, GPUs, storage, network, disks, limits.

    Each line is green, or red and says what to do, or has nothing to check (-). Nodes are visited by actors without
    CPUs, so a busy cluster can be examined. The storage is written and read, and torch sums over all nodes, for a moment.

    Without an address a Ray of its own is started on this machine. A cluster is examined from one of its nodes:
      ray job submit --address http://HEAD:8265 -- raytrain doctor --storage s3://bucket/runs
      ray exec cluster.yaml 'raytrain doctor --address auto --storage s3://bucket/runs'

    Exit code: 0 all green, 1 some red, 2 wrong use.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    address: str | None = None
    """HOST:PORT of the cluster's head, or auto for the cluster of this machine, if RAY_ADDRESS does not say it."""
    storage: str = "./runs"
    """Where runs are to be kept, a path or a URI; as --run.storage."""
    workers: str | None = None
    """Workers of a run, as --run.workers: are there CPUs for the smallest number of them?"""
    cpus_per_worker: float = Field(1.0, alias="cpus-per-worker", gt=0)
    """As --run.cpus-per-worker."""
    min_disk_gib: float = Field(1.0, alias="min-disk", ge=0)
    """GiB that are to be free on disks."""
    limit_s: float = Field(15.0, alias="limit", gt=0)
    """Seconds for a sum over all nodes; who does not answer within twice as many is given up."""
    as_json: CliToggleFlag[bool] = Field(False, alias="json")
    """Write the rows as JSON."""

    def cli_cmd(self) -> None:
        """Examines, and writes what was found to stdout.

        Raises:
            SystemExit: with code 1, where something is red.
            FourPartError: there is no such cluster, or a flag is wrong.
        """
        from rich.console import Console

        from raytrain.cluster.doctor.table import is_green, render, to_json

        console, began = Console(file=sys.stdout, highlight=False), time.monotonic()
        workers = _least(self.workers)
        if address := self.address or os.environ.get("RAY_ADDRESS"):
            check_address(address, "--address" if self.address else "RAY_ADDRESS")
            os.environ["RAY_ADDRESS"] = address
        with _progress(console, shown=not self.as_json) as say:
            rows = self._examine(workers, say)
        seconds = time.monotonic() - began
        if self.as_json:
            sys.stdout.write(json.dumps(to_json(rows, seconds), indent=1) + "\n")
        else:
            console.print(render(rows, seconds, console.width, console.encoding.startswith("utf")), soft_wrap=True)
        if not is_green(rows):
            raise SystemExit(1)

    def _examine(self, workers: int, say: Callable[[str], None]) -> list[Row]:
        say("connecting to Ray")
        with contextlib.ExitStack() as opened:
            _connect(opened)
            from raytrain.cluster.doctor.examine import Order, examine
            from raytrain.elastic.variables import forwarded
            from raytrain.launch.storage import absolute

            order = Order(
                storage=absolute(self.storage),
                workers=workers,
                cpus_per_worker=self.cpus_per_worker,
                least_disk_bytes=self.min_disk_gib * 2**30,
                limit_s=self.limit_s,
                variables=forwarded(os.environ),
                say=say,
            )
            return examine(order)


def check_address(address: str, where: str) -> None:
    """Finds out at once what ray.init would say after a minute, or not clearly.

    Args:
        where: it was given.

    Raises:
        ConfigError: it is an address of another kind.
        ResourceError: nobody listens there.
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


def _connect(opened: contextlib.ExitStack) -> None:
    from raytrain.launch.cluster import connected

    try:
        opened.enter_context(connected())
    except (ConnectionError, RuntimeError, ValueError) as error:
        where, fix = os.environ.get("RAY_ADDRESS") or "this machine", "mend what is named above"
        raise ResourceError("Ray", f"{where}: {error}", "can be connected to from here", fix) from error


def _least(workers: str | None) -> int:
    """The smallest number of workers, or 0 if none is given.

    Raises:
        ConfigError: it is no range.
    """
    try:
        least = parse_range(workers)[0] if workers else 0
    except ValueError:
        least = -1
    if least < 0:
        raise ConfigError("--workers", str(workers), "is a number, or a range min:max", "write it like: 4 or 4:64")
    return least


@contextlib.contextmanager
def _progress(console: Console, shown: bool) -> Iterator[Callable[[str], None]]:
    """What tells a person at a terminal what happens now."""
    if not shown or not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield status.update
