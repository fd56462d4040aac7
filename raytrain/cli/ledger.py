"""`raytrain ledger`: where did the time of a run go? Reads the run's directory, also while it goes on; needs no cluster."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import CliPositionalArg, CliToggleFlag

from raytrain.cli.audit import run_dir_at
from raytrain.errors import StorageError

if TYPE_CHECKING:
    from raytrain.events.view import RunView
    from raytrain.rundir import RunDir


class LedgerCommand(BaseModel):
    """Show where the time of a run went: every second in one class, and how much of it was training.

    Time between two starts of the run does not count. A run that goes on is counted to its last event.
    Exit code: 0 done, 2 wrong use.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    run_dir: CliPositionalArg[str]
    """Directory of the run, a path or a URI: its storage, then its name, for example runs/digits."""
    as_json: CliToggleFlag[bool] = Field(False, alias="json")
    """Write the ledger as JSON."""

    def cli_cmd(self) -> None:
        """Writes the ledger to stdout.

        Raises:
            StorageError: there is no run.
        """
        run_dir = run_dir_at(self.run_dir)
        view = view_of(run_dir)
        lines = [json.dumps(to_json(view, run_dir.path), indent=1)] if self.as_json else table(view, run_dir.path)
        sys.stdout.write("\n".join(lines) + "\n")


def view_of(run_dir: RunDir) -> RunView:
    """What the events of a run add up to.

    Raises:
        StorageError: there are none, or they cannot be read.
    """
    from raytrain.events.log import read
    from raytrain.events.view import fold
    from raytrain.rundir import EVENTS

    rule, fix = f"a run's directory holds {EVENTS}", "give the directory of a run: its storage, then its name"
    try:
        view = fold(read(run_dir))
    except NotADirectoryError:
        raise StorageError(run_dir.path, f"no {EVENTS}", rule, fix) from None
    except OSError as error:
        raise StorageError(run_dir.path, str(error), f"{EVENTS} can be read", "mend what is named above") from None
    if not view.books.sessions:
        raise StorageError(run_dir.path, f"no {EVENTS}, or no start of a run in it", rule, fix)
    return view


def to_json(view: RunView, directory: str) -> dict[str, Any]:
    """The ledger as plain values; `outcome` is null while the run goes on, or if its driver was killed."""
    ledger = view.books.at()
    return {
        "directory": directory,
        "outcome": view.ended.outcome if view.ended else None,
        "step": view.step,
        "num_steps": view.num_steps,
        "sessions": view.books.sessions,
        "wall_s": ledger.wall_s,
        "goodput": ledger.goodput,
        "seconds": {name.removesuffix("_s"): seconds for name, seconds in ledger.seconds().items()},
    }


def table(view: RunView, directory: str) -> list[str]:
    """The ledger for people."""
    from raytrain.events.ledger import TITLES
    from raytrain.events.words import count_of
    from raytrain.units import format_seconds

    ledger, num_starts = view.books.at(), count_of(view.books.sessions, "start")
    state = view.ended.outcome if view.ended else "not ended, counted to its last event"
    wall_s = ledger.wall_s
    rows = [(TITLES[name], seconds) for name, seconds in ledger.seconds().items()]
    return [
        f"ledger of {directory}: {state}, step {view.step} of {view.num_steps}, {num_starts}",
        f"  {'class':<19} {'seconds':>12} {'percent':>8}",
        *(_row(title, seconds, wall_s) for title, seconds in [*rows, ("wall time", wall_s)]),
        f"goodput {100 * ledger.goodput:.1f} %: {format_seconds(ledger.training_s)} of training in {format_seconds(wall_s)}",
    ]


def _row(title: str, seconds: float, wall_s: float) -> str:
    return f"  {title:<19} {seconds:>12,.3f} {100 * seconds / wall_s if wall_s else 0.0:>8.1f}"
