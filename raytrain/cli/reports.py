"""What do the records of finished or running runs say? `raytrain audit`, `raytrain compare` and `raytrain ledger`.

They read run directories and need no cluster; `raytrain.report` and `raytrain.events` compute what is written here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from raytrain.cli.flags import Argument, Command, option
from raytrain.errors import StorageError
from raytrain.events.goodput import TITLES
from raytrain.events.messages import count_of
from raytrain.units import format_seconds

if TYPE_CHECKING:
    from raytrain.events.view import RunView
    from raytrain.report.comparison import Comparison
    from raytrain.rundir import RunDir

SHOWN_NAMES = 5
DIRECTORY = "Run directory, a path or a URI: the storage, then the run's name, for example runs/digits."

run_dir = click.argument("run_dir", cls=Argument, line=DIRECTORY)
as_json = option("--json", "as_json", is_flag=True, help="Write the report as JSON.")


@click.command(cls=Command)
@run_dir
@as_json
def audit(run_dir: str, as_json: bool) -> int:
    """Prove that each row was trained on exactly once.

    Compares the records of a run, which was started with --run.audit, with its plan: each row, in its planned step.

    Exit code: 0 passed, 1 failed, 2 wrong use.
    """
    from raytrain.report import audit as report

    found = report.audit(run_dir_at(run_dir))
    _write(as_json, found.to_json, found.lines)
    return 0 if found.passed else 1


@click.command(cls=Command)
@run_dir
@click.argument("other_dir", cls=Argument, line="Directory of the run to compare it with.")
@as_json
def compare(run_dir: str, other_dir: str, as_json: bool) -> int:
    """Show whether two runs have the same result, to the last bit.

    Compares the loss of each step, the files of checkpoints, and digests of weights and optimizer state if both runs
    recorded them (--run.digest every:N). Says where the runs begin to differ. Both runs have the same data, seed and batch;
    their workers may differ.

    Exit code: 0 identical as far as is known, 1 different, 2 wrong use.
    """
    from raytrain.report import comparison
    from raytrain.report.outcome import outcome_of

    found = comparison.compare(outcome_of(run_dir_at(run_dir)), outcome_of(run_dir_at(other_dir)))
    _write(as_json, found.to_json, lambda: comparison_lines(found))
    return 0 if found.is_identical else 1


@click.command(cls=Command)
@run_dir
@as_json
def ledger(run_dir: str, as_json: bool) -> None:
    """Show where the time of a run went.

    Assigns each second to one class, and says how much of it was training. Time between two starts of the run does not
    count. A run that is still going on counts to its last event.

    Exit code: 0 done, 2 wrong use.
    """
    directory = run_dir_at(run_dir)
    view = _view_of(directory)
    _write(as_json, lambda: _ledger_json(view, directory.path), lambda: _ledger_lines(view, directory.path))


def run_dir_at(text: str) -> RunDir:
    """The run's directory from a path or URI, `<storage>/<name>`; a URI's options (`?region=...`) stay with it.

    Raises:
        StorageError: pyarrow does not know the URI.
    """
    from raytrain.rundir import RunDir

    is_uri = "://" in text
    location, mark, options = text.partition("?") if is_uri else (os.path.abspath(os.path.expanduser(text)), "", "")
    storage, _, name = location.rstrip("/").rpartition("/")
    try:
        return RunDir.at((storage or "/") + mark + options, name)
    except (ValueError, OSError) as error:
        rule = "is a path, or a URI such as s3://bucket/runs/digits"
        raise StorageError(text, str(error), rule, "check its spelling") from None


def _write(as_json: bool, to_json: Callable[[], Any], lines: Callable[[], Sequence[str]]) -> None:
    sys.stdout.write((json.dumps(to_json(), indent=1) if as_json else "\n".join(lines())) + "\n")


# The comparison as text.


def comparison_lines(found: Comparison) -> list[str]:
    """The comparison for people."""
    return [
        f"compare {_verdict(found)}: {found.runs[0]} and {found.runs[1]}",
        *_part("digests", _digests(found)),
        *_part("losses", _losses(found)),
        *_part("files", _files(found)),
        *_part("settings", [] if found.is_identical else _settings(found)),
    ]


def _verdict(found: Comparison) -> str:
    if found.is_identical:
        return f"identical through step {found.through_step}{'' if found.digests else ', as far as is known'}"
    if found.state:
        return f"DIFFERENT after {count_of(found.state.step, 'step')}"
    return f"DIFFERENT in the loss of step {found.loss.step}" if found.loss else "DIFFERENT in saved weights"


def _digests(found: Comparison) -> list[str]:
    if not found.digests:
        have = " and ".join(map(str, found.own_digests))
        how = "run both with --run.digest every:N to compare weights and optimizer bit by bit"
        return [f"none of the same step ({have} in all): only losses and files were compared", how]
    compared, state = f"{len(found.digests)} compared", found.state
    if state is None:
        return [f"{compared}, all equal; the last after {count_of(found.digests[-1], 'step')}"]
    before = "none before it" if state.equal_until is None else f"equal after {count_of(state.equal_until, 'step')}"
    return [
        f"{compared}; the first that differs is after {count_of(state.step, 'step')}, {before}",
        f"{len(state.tensors)} of {count_of(state.num_tensors, 'tensor')} differ: {_some(state.tensors)}",
    ]


def _losses(found: Comparison) -> list[str]:
    if not found.losses:
        return ["none of the same step"]
    if found.loss is None:
        return [f"{len(found.losses)} compared, all equal to the last bit"]
    step, (one, other) = found.loss.step, found.loss.losses
    return [f"{len(found.losses)} compared; the first that differs is in step {step} (from 0): {one!r} and {other!r}"]


def _files(found: Comparison) -> list[str]:
    if not found.files:
        return ["no checkpoints of the same step"]
    compared, other = f"{len(found.files)} of checkpoints compared", [file for file in found.files if not file.is_equal]
    if not other:
        return [f"{compared}, all equal"]
    text = f"{compared}; different: {_some([f'{file.name} of step {file.step}' for file in other])}"
    note = "such files may differ in form alone, so they do not count"
    return [text] if any(file.is_proof for file in other) else [text, note]


def _settings(found: Comparison) -> list[str]:
    note = "without run.exactness bitwise, the number of workers changes the last bits of sums"
    return [*(found.settings or ["no difference that could explain it"]), *([] if found.is_bitwise else [note])]


def _part(title: str, words: Sequence[str]) -> list[str]:
    return [f"  {title if i == 0 else '':<9} {text}" for i, text in enumerate(words)]


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


# The ledger as text.


def _view_of(run_dir: RunDir) -> RunView:
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
        raise StorageError(run_dir.path, str(error), f"{EVENTS} can be read", "correct the cause above") from None
    if not view.goodput.sessions:
        raise StorageError(run_dir.path, f"no {EVENTS}, or no start of a run in it", rule, fix)
    return view


def _ledger_json(view: RunView, directory: str) -> dict[str, Any]:
    """The ledger as plain values; `outcome` is null while the run goes on, or if its driver was killed."""
    ledger = view.goodput.at()
    return {
        "directory": directory,
        "outcome": view.ended.outcome if view.ended else None,
        "step": view.step,
        "num_steps": view.num_steps,
        "sessions": view.goodput.sessions,
        "wall_s": ledger.wall_s,
        "goodput": ledger.goodput,
        "seconds": {name.removesuffix("_s"): seconds for name, seconds in ledger.seconds().items()},
    }


def _ledger_lines(view: RunView, directory: str) -> list[str]:
    """The ledger for people."""
    ledger, num_starts = view.goodput.at(), count_of(view.goodput.sessions, "start")
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
