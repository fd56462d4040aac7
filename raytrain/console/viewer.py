"""Who shows a run or a sweep on stdout? A live frame on a terminal that can draw it, plain lines elsewhere.

The driver passes each new event of a run to its viewer and calls `tick` several times per second; that of a sweep passes
the whole sweep as a value as often.
"""

from __future__ import annotations

from typing import TextIO

from rich.console import Console

from raytrain.console.live import LiveSweepViewer, LiveViewer
from raytrain.console.plain import PlainSweepViewer, PlainViewer
from raytrain.events.view import RunView


def choose(out: TextIO, err: TextIO, view: RunView | None = None) -> LiveViewer | PlainViewer:
    """The viewer for a run.

    Args:
        out: where the run is shown.
        err: where lines go that the task wrote to stderr.
        view: of a run that is resumed: `fold` of its earlier events.
    """
    console = Console(file=out)
    return LiveViewer(console, err, view) if _can_draw(console) else PlainViewer(out, err, view)


def choose_for_sweep(out: TextIO) -> LiveSweepViewer | PlainSweepViewer:
    """The viewer for a sweep that is shown on `out`."""
    console = Console(file=out)
    return LiveSweepViewer(console) if _can_draw(console) else PlainSweepViewer(out)


def _can_draw(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
