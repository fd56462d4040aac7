"""`raytrain chaos`: does a run survive what the cluster will do to it? Injects faults, in a process beside the run."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from pydantic import PositiveFloat

from raytrain.cli.flags import Argument, Command, number, option, say
from raytrain.cli.reports import run_dir_at
from raytrain.errors import ConfigError

if TYPE_CHECKING:
    from raytrain.cluster.chaos import Fault


seconds = partial(option, type=number(PositiveFloat), metavar="SECONDS")


@click.command(cls=Command)
@click.argument("run_dir", cls=Argument, line="Directory of a run that trains on this machine: its storage, then its name.")
@option("--script", metavar="PATH", help="File with the faults, instead of random faults.")
@seconds("--every", "every_s", default=15.0, help="Random faults: time between two.")
@seconds("--for", "for_s", default=120.0, help="Random faults: at most from the first training step to the last fault.")
@option("--faults", metavar="A,B", default="kill,stop", help="Random faults: which ones.")
@option("--seed", type=int, metavar="N", default=0, help="Random faults: seed of their choice.")
@seconds("--deadline", "deadline_s", default=30.0, help="Drains: time until the announced deadline.")
@option("--address", help="Drains: address of the cluster.  [default: RAY_ADDRESS]")
def chaos(
    run_dir: str,
    script: str | None,
    every_s: float,
    for_s: float,
    faults: str,
    seed: int,
    deadline_s: float,
    address: str | None,
) -> int:
    """Inject faults into a run, to see what it survives.

    Faults: kill (SIGKILL for a worker), stop (SIGSTOP: the worker hangs until it is considered dead), drain (announces that
    a worker's node goes away; nothing is killed at the deadline) and node (SIGKILL for a worker's node, never the head).
    Only processes on this machine get signals. The run's events record what was done.

    Faults are random, or come from a script with lines such as

    \b
      after 30 kill w1
      step 100 stop rank0
      after 60 drain 10.0.0.2

    where seconds count from the first training step, and steps are finished steps.

    Exit code: 0 all faults happened or the run ended, 1 not, 2 wrong use.
    """
    from raytrain.cluster.chaos import ChaosRunner, open_running, parse_kinds, random_schedule
    from raytrain.cluster.fault_injection import FaultInjector

    schedule = (
        random_schedule(every_s, for_s, parse_kinds(faults, "--faults"), seed) if script is None else _scripted(script)
    )
    cluster = address or os.environ.get("RAY_ADDRESS", "")
    if not cluster and any(fault.kind == "drain" for fault in schedule):
        rule = "a drain is announced to the cluster"
        raise ConfigError("--address", "not given", rule, "give the cluster's address, or set RAY_ADDRESS")
    outcome = ChaosRunner(open_running(run_dir_at(run_dir)), schedule, FaultInjector(cluster, deadline_s).inject, say).run()
    view = outcome.view
    say(
        f"{outcome.injected} of {len(schedule)} faults happened; the run: {view.state}, step {view.step} of {view.num_steps}"
    )
    return 1 if outcome.missed or (view.ended and view.ended.outcome == "failed") else 0


def _scripted(path: str) -> list[Fault]:
    from raytrain.cluster.chaos import parse_script

    try:
        return parse_script(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--script", path, f"is a text file ({error})", "give the path of one") from None
