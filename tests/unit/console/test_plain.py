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


def test_routine_events_are_told_in_the_lines_of_progress() -> None:
    lines = progress(shown(demo_events(400), interval_s=10.0))
    assert lines[1].endswith("valid/loss 0.2804, valid/accuracy 0.9712 at step 184  saved step 184")
    saved = kinds.CheckpointSaved(time=START, step=3, checkpoint="c", size_bytes=1, seconds=1.0, stall_s=0.0)
    assert shown([saved]) == ""


def test_r16_skipped_steps_are_counted_and_not_told_one_by_one() -> None:
    skipped = [kinds.StepSkipped(time=START, step=i, loss=float("nan")) for i in range(1000)]
    lines = shown([*demo_events(4), *skipped, *demo_events(8)[-1:]], interval_s=0.0).splitlines()
    assert len(lines) < 10
    assert "1,000 skipped steps" in lines[-1]


def test_what_the_driver_waits_for_is_a_line_of_its_own() -> None:
    out = Flushed()
    PlainViewer(out, io.StringIO()).say("starting Ray on this machine", START)
    assert out.shown.endswith(" starting Ray on this machine\n")
