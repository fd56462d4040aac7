"""Who shows a run: a live frame on a terminal that can draw it, plain lines elsewhere.

The driver hands each new event to a viewer and lets it tick a few times per second. Nothing here reads the events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TextIO

from rich.console import Console

from raytrain.console.live import LiveViewer
from raytrain.console.plain import PlainViewer
from raytrain.events.kinds import Event
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


def choose(out: TextIO, err: TextIO, view: RunView | None = None, interval_s: float = 10.0) -> Viewer:
    """The viewer that suits `out`.

    Args:
        out: where the run is shown, usually sys.stdout.
        err: where lines go that the task wrote to stderr, usually sys.stderr.
        view: what was known of a run that goes on: `fold` of the events before.
        interval_s: seconds between two plain lines of progress.
    """
    console = Console(file=out)
    if console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf"):
        return LiveViewer(console, err, view)
    return PlainViewer(out, err, view, interval_s)


if __name__ == "__main__":
    import sys

    from raytrain.console.demo import demo_events

    viewer = choose(sys.stdout, sys.stderr)
    for event in demo_events(460, ended=True):
        viewer.on_events([event])
        viewer.tick(event.time)
    viewer.close()
