"""`raytrain chaos`: does a run survive what the cluster will do to it? Disturbs one on purpose, in a process beside it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import CliPositionalArg

from raytrain.errors import ConfigError

if TYPE_CHECKING:
    from raytrain.cluster.chaos import Fault
    from raytrain.cluster.rehearsal import Outcome


class Chaos(BaseModel):
    """Disturb a run of yours on purpose, to see what it survives.

    Faults: kill (SIGKILL for a worker), stop (SIGSTOP: it hangs until it is declared dead), drain (announces that a
    worker's node goes away; nothing is killed at the deadline) and node (SIGKILL for a worker's node, never the head).
    Only processes on this machine are signalled. What was done is written into the run's events.

    They come at random, or from a script with lines such as
      after 30 kill w1
      step 100 stop rank0
      after 60 drain 10.0.0.2
    where seconds count from when workers train, and steps are finished ones.

    Exit code: 0 all faults happened or the run came to its end, 1 not, 2 wrong use.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    run_dir: CliPositionalArg[str]
    """Directory of the run, which must be training, on this machine: its storage, then its name."""
    script: str | None = None
    """File with the faults, instead of faults at random."""
    every_s: float = Field(15.0, alias="every", gt=0)
    """At random: seconds between two faults."""
    for_s: float = Field(120.0, alias="for", gt=0)
    """At random: seconds from when workers train to the last fault, at most."""
    faults: str = "kill,stop"
    """At random: which ones, with commas between them."""
    seed: int = 0
    """At random: the same seed gives the same faults."""
    deadline_s: float = Field(30.0, alias="deadline", gt=0)
    """Seconds after which a drained node is said to be gone."""
    address: str | None = None
    """Address of the cluster, for drains, if RAY_ADDRESS does not say it."""

    def cli_cmd(self) -> None:
        """Disturbs the run, and says on stdout what it does.

        Raises:
            SystemExit: with code 1, where a fault found no victim, or the run failed.
            FourPartError: there is no run to disturb, or no such schedule.
        """
        from raytrain.cli.audit import run_dir_at
        from raytrain.cluster.record import open_running
        from raytrain.cluster.rehearsal import Hands, Rehearsal

        schedule = self._schedule()
        cluster = self.address or os.environ.get("RAY_ADDRESS", "")
        if not cluster and any(fault.kind == "drain" for fault in schedule):
            rule = "a drain is announced to the cluster"
            raise ConfigError("--address", "not given", rule, "give the cluster's address, or set RAY_ADDRESS")
        record = open_running(run_dir_at(self.run_dir))
        outcome = Rehearsal(record, schedule, Hands(cluster, self.deadline_s).cause, _say).run()
        _say(_summary(outcome, len(schedule)))
        if outcome.missed or (outcome.view.ended and outcome.view.ended.outcome == "failed"):
            raise SystemExit(1)

    def _schedule(self) -> list[Fault]:
        from raytrain.cluster.chaos import drawn, parse_kinds, parse_script

        if self.script is None:
            return drawn(self.every_s, self.for_s, parse_kinds(self.faults, "--faults"), self.seed)
        try:
            return parse_script(Path(self.script).read_text(encoding="utf-8"), self.script)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("--script", self.script, f"is a text file ({error})", "give the path of one") from None


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _summary(outcome: Outcome, planned: int) -> str:
    view = outcome.view
    return f"{outcome.fired} of {planned} faults happened; the run: {view.state}, step {view.step} of {view.num_steps}"
