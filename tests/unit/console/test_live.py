"""The frame fits the terminal and shows what is known."""

from __future__ import annotations

import functools
import io
import math

import pytest
from rich.console import Console

from raytrain.console.demo import START, demo_events
from raytrain.console.live import BLOCKS, LiveViewer, render, sparkline
from raytrain.console.words import take
from raytrain.events import kinds
from raytrain.events.view import RunView, fold, reduce
from tests.golden import check


def draw(view: RunView, width: int = 80, now: float | None = START + 30) -> str:
    console = Console(file=io.StringIO(), width=width, height=24, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(render(view, width, now))
    return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())


def watched(events: list[kinds.Event]) -> RunView:
    return functools.reduce(take, events, RunView())


@pytest.mark.parametrize("num_steps", [0, 4, 202, 262, 412])
def test_the_frame_of_the_canned_run_is_as_agreed(num_steps: int) -> None:
    check(f"live_{num_steps:03d}.txt", draw(watched(demo_events(num_steps))))


def test_a_frame_of_nothing_can_be_drawn() -> None:
    assert draw(RunView()).startswith("raytrain  starting")


def crowded() -> RunView:
    """A run with many workers, long names, many metrics and many notes."""
    names = [f"worker-{rank:04d}-with-a-very-long-name" for rank in range(64)]
    members = [
        kinds.Member(worker=name, rank=rank, node="fd00:" + "a" * 60, pid=10**6, logical=list(range(0, 999, 2)))
        for rank, name in enumerate(names)
    ]
    formed = kinds.GenerationFormed(generation=9, step=0, members=members, pause_s=0.0, cause="start")
    starting = [kinds.WorkerStarting(worker=f"new {i}", node="n", pid=i) for i in range(20)]
    metrics = {f"valid/metric number {i}": 123456.789 * i for i in range(20)}
    done = kinds.EvaluationDone(step=10**7, metrics=metrics, rows=1, seconds=1.0, is_best=True)
    saved = kinds.CheckpointSaved(step=10**7, checkpoint="c", size_bytes=10**15, seconds=1.0, stall_s=1.0)
    skipped = [kinds.StepSkipped(step=i, loss=math.nan) for i in range(3)]
    return watched([*demo_events(100), formed, *starting, done, saved, *skipped])


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_the_frame_always_fits(width: int) -> None:
    lines = draw(crowded(), width).splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= min(width, 100)


def test_a_lost_worker_is_marked_until_the_next_generation() -> None:
    lost = kinds.WorkerLost(worker="w1", node="10.0.0.12", pid=4121, reason="killed")
    frame = draw(reduce(fold(demo_events(100)), lost))
    (row,) = [line for line in frame.splitlines() if line.startswith("1     w1")]
    assert row.endswith("lost")


def test_the_frame_says_where_the_time_went_as_far_as_it_fits() -> None:
    waiting = kinds.WaitingForWorkers(time=START + 12, have=0, need=1, reason="none is there")
    lost = kinds.WorkerLost(time=START + 10, worker="w1", node="10.0.0.12", pid=4121, reason="killed")
    view = fold([*demo_events(92), lost, waiting])
    (line,) = [line for line in draw(view, now=START + 32).splitlines() if line.startswith("goodput")]
    assert line == "goodput  14.4 %    waiting for workers 20.0 s  starting 5.0 s  training 4.6 s"
    (line,) = [line for line in draw(view, 40, now=START + 32).splitlines() if line.startswith("goodput")]
    assert line == "goodput  14.4 %"


def test_a_sparkline_goes_from_the_lowest_to_the_highest_block() -> None:
    assert sparkline(range(8), 80) == BLOCKS
    assert sparkline(range(800), 8) == BLOCKS
    assert sparkline([1.0, math.nan, 3.0, math.inf], 10) == "▁ █ "
    assert sparkline([2.0, 2.0], 10) == "▁▁"
    assert sparkline([], 10) == sparkline([1.0], 0) == sparkline([math.nan], 5) == ""


def viewer_on_a_terminal(err: io.StringIO) -> tuple[LiveViewer, io.StringIO]:
    out = io.StringIO()
    return LiveViewer(Console(file=out, width=80, height=24, force_terminal=True, color_system=None), err), out


def test_printed_lines_stand_above_the_frame_and_stderr_goes_to_a_file_if_it_is_one() -> None:
    err = io.StringIO()
    viewer, out = viewer_on_a_terminal(err)
    viewer.tick(START)
    viewer.on_events([kinds.Printed(rank=3, stream="stdout", text="[bold]not markup[/bold]\r\n")])
    viewer.on_events([kinds.Printed(rank=4, stream="stderr", text="oh")])
    viewer.close()
    assert "[rank 3] [bold]not markup[/bold]\n" in out.getvalue()
    assert err.getvalue() == "[rank 4] oh\n"


def test_the_last_frame_and_the_summary_stay_on_the_screen() -> None:
    viewer, out = viewer_on_a_terminal(io.StringIO())
    viewer.on_events(demo_events(100))
    viewer.tick(START + 10)
    viewer.on_events(demo_events(460, ended=True))
    viewer.tick(START + 40)
    viewer.close()
    screen = out.getvalue()
    assert screen.rindex("checkpoints  /home/me/runs/digits/checkpoints") > screen.rindex("logical workers")
    assert "step 460/460" in screen


def test_a_viewer_that_was_never_drawn_can_be_closed() -> None:
    viewer, out = viewer_on_a_terminal(io.StringIO())
    viewer.close()
    assert "digits" not in out.getvalue()


def test_before_a_run_is_known_the_frame_says_what_is_waited_for() -> None:
    viewer, out = viewer_on_a_terminal(io.StringIO())
    viewer.say("starting Ray on this machine", START)
    assert "starting Ray on this machine" in out.getvalue()
    assert "step 0/0" not in out.getvalue()


def test_a_run_that_goes_on_shows_its_earlier_curve_but_not_how_it_ended_before() -> None:
    err, out = io.StringIO(), io.StringIO()
    console = Console(file=out, width=80, height=24, force_terminal=True, color_system=None)
    viewer = LiveViewer(console, err, fold(demo_events(460, ended=True)))
    viewer.say("starting Ray on this machine", START + 100)
    assert "█" in out.getvalue()
    assert "completed" not in out.getvalue()
    viewer.close()
    assert "checkpoints  /" not in out.getvalue()


def test_routine_events_do_not_push_out_the_notes() -> None:
    lost = kinds.WorkerLost(time=START, worker="w1", node="10.0.0.12", pid=4121, reason="killed")
    saved = [kinds.CheckpointSaved(step=i, checkpoint="c", size_bytes=1, seconds=1.0, stall_s=0.0) for i in range(50)]
    frame = draw(watched([*demo_events(8), lost, *saved]))
    assert "lost worker w1" in frame
    assert "saved    step 49" in frame
