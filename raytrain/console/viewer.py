"""Who shows a run or a sweep: a live frame on a terminal that can draw it, plain lines elsewhere.

The driver of a run hands each new event to a viewer and lets it tick a few times per second; that of a sweep shows the
whole sweep as a value as often. Nothing here reads what is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TextIO

from rich.console import Console

from raytrain.console.live import LiveViewer
from raytrain.console.plain import PlainViewer
from raytrain.console.sweep_live import LiveSweepViewer
from raytrain.console.sweep_plain import PlainSweepViewer
from raytrain.events.kinds import Event
from raytrain.events.sweep import SweepView
from raytrain.events.view import RunView


class Viewer(Protocol):
    """Shows a run to somebody; called from one thread."""

    def on_events(self, events: Sequence[Event]) -> None:
        """Takes what is new, oldest first; shows at once what cannot wait, such as printed lines."""

    def tick(self, now: float) -> None:
        """Shows what is due at `now`, Unix seconds."""

    def say(self, text: str, now: float) -> None:
        """Shows what the driver does before there are events; `now` in Unix seconds."""

    def close(self) -> None:
        """Leaves the screen tidy; called once, also after an error."""


class SweepViewer(Protocol):
    """Shows a sweep to somebody; called from one thread."""

    def show(self, view: SweepView, now: float) -> None:
        """Shows what is due of the sweep as it is at `now`, Unix seconds; may be called as often as one likes."""

    def say(self, text: str, now: float) -> None:
        """Shows what the driver does; `now` in Unix seconds."""

    def close(self) -> None:
        """Leaves the screen tidy, and how the sweep ended if it has; called once, also after an error."""


def choose(out: TextIO, err: TextIO, view: RunView | None = None, interval_s: float = 10.0) -> Viewer:
    """The viewer that suits `out`.

    Args:
        out: where the run is shown, usually sys.stdout.
        err: where lines go that the task wrote to stderr, usually sys.stderr.
        view: what was known of a run that goes on: `fold` of the events before.
        interval_s: seconds between two plain lines of progress.
    """
    console = Console(file=out)
    return LiveViewer(console, err, view) if _can_draw(console) else PlainViewer(out, err, view, interval_s)


def choose_for_sweep(out: TextIO, interval_s: float = 10.0) -> SweepViewer:
    """The viewer of a sweep that suits `out`.

    Args:
        out: where the sweep is shown, usually sys.stdout.
        interval_s: seconds between two plain lines of progress.
    """
    console = Console(file=out)
    return LiveSweepViewer(console) if _can_draw(console) else PlainSweepViewer(out, interval_s)


def _can_draw(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")


if __name__ == "__main__":
    import sys

    from raytrain.console.demo import demo_events

    viewer = choose(sys.stdout, sys.stderr)
    for event in demo_events(460, ended=True):
        viewer.on_events([event])
        viewer.tick(event.time)
    viewer.close()
