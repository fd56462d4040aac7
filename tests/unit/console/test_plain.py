"""Without a terminal a run is whole lines, not too many of them."""

from __future__ import annotations

import io

from raytrain.console.demo import START, demo_events
from raytrain.console.plain import PlainViewer
from raytrain.events import kinds
from raytrain.events.view import fold
from tests.golden import check


class Flushed(io.StringIO):
    """Shows only what was flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = ""

    def flush(self) -> None:
        self.shown = self.getvalue()


def shown(events: list[kinds.Event], interval_s: float = 10.0) -> str:
    out = Flushed()
    viewer = PlainViewer(out, io.StringIO(), interval_s=interval_s)
    for event in events:
        viewer.on_events([event])
        viewer.tick(event.time)
        assert out.shown == out.getvalue()
    return out.shown


def test_the_lines_of_the_canned_run_are_as_agreed() -> None:
    check("plain.txt", shown(demo_events(460, ended=True)))


def progress(text: str) -> list[str]:
    return [line for line in text.splitlines() if " step " in line and "rows/s" in line]


def test_r16_there_is_one_line_of_progress_per_interval_and_the_first_at_once() -> None:
    events = demo_events(400)
    assert [len(progress(shown(events, interval_s))) for interval_s in (10.0, 5.0, 1000.0)] == [2, 4, 1]


def test_r16_a_run_that_stands_still_writes_no_lines() -> None:
    out = io.StringIO()
    viewer = PlainViewer(out, io.StringIO())
    viewer.on_events(demo_events(8))
    viewer.tick(START + 10)
    before = out.getvalue()
    for now in range(20, 200, 10):
        viewer.tick(START + now)
    assert out.getvalue() == before


def test_r16_lines_hold_no_control_characters_whatever_is_printed() -> None:
    text = shown([kinds.Printed(rank=0, stream="stdout", text="\x1b[31m50%\r100%\x07\x1b[0m\r\n")])
    assert text == "[rank 0] 100%\n"


def test_what_the_task_wrote_to_stderr_goes_to_stderr() -> None:
    out, err = io.StringIO(), io.StringIO()
    PlainViewer(out, err).on_events([kinds.Printed(rank=1, stream="stderr", text="oh")])
    assert (out.getvalue(), err.getvalue()) == ("", "[rank 1] oh\n")


def test_a_run_that_goes_on_does_not_tell_its_history_again() -> None:
    out = io.StringIO()
    viewer = PlainViewer(out, io.StringIO(), fold(demo_events(400)))
    viewer.tick(START)
    assert out.getvalue() == ""
