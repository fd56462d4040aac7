"""Without a terminal a run or a sweep is whole lines, not too many of them."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest

from raytrain.console.plain import PlainSweepViewer, PlainViewer, changes, sweep_progress
from raytrain.events import kinds
from raytrain.events.sweep import SweepView, TrialView
from raytrain.events.view import fold
from tests.golden import check
from tests.support.demo_run import START, demo_events
from tests.support.demo_sweep import FAILURE, demo_views


class Flushed(io.StringIO):
    """Shows only what was flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = ""

    def flush(self) -> None:
        self.shown = self.getvalue()


def run_lines(events: list[kinds.Event], interval_s: float = 10.0) -> str:
    out = Flushed()
    viewer = PlainViewer(out, io.StringIO(), interval_s=interval_s)
    for event in events:
        viewer.on_events([event])
        viewer.tick(event.time)
        assert out.shown == out.getvalue()
    return out.shown


def sweep_lines(views: list[tuple[float, SweepView]], interval_s: float = 10.0) -> str:
    out = Flushed()
    viewer = PlainSweepViewer(out, interval_s)
    for now, view in views:
        viewer.show(view, now)
        assert out.shown == out.getvalue()
    viewer.close()
    return out.shown


def test_the_lines_of_a_run_and_of_a_sweep_are_as_agreed() -> None:
    check("plain.txt", run_lines(demo_events(460, ended=True)))
    check("sweep_plain.txt", sweep_lines(list(demo_views())))


def run_progress_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if " step " in line and "rows/s" in line]


def sweep_progress_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if " trials ended, " in line and " running" in line]


def test_r16_there_is_at_most_one_line_of_progress_per_interval() -> None:
    events, views = demo_events(400), list(demo_views())[:61]
    assert [len(run_progress_of(run_lines(events, interval_s))) for interval_s in (10.0, 5.0, 1000.0)] == [2, 4, 1]
    assert [len(sweep_progress_of(sweep_lines(views, interval_s))) for interval_s in (10.0, 20.0, 1000.0)] == [6, 3, 0]


def test_r16_what_stands_still_writes_no_lines() -> None:
    out = io.StringIO()
    viewer = PlainViewer(out, io.StringIO())
    viewer.on_events(demo_events(8))
    viewer.tick(START + 10)
    before = out.getvalue()
    for now in range(20, 200, 10):
        viewer.tick(START + now)
    assert out.getvalue() == before
    view = list(demo_views())[40][1]
    assert len(sweep_progress_of(sweep_lines([(START + i, view) for i in range(300)]))) == 1


def test_r16_lines_hold_no_control_characters_whatever_is_printed() -> None:
    text = run_lines([kinds.OutputLine(rank=0, stream="stdout", text="\x1b[31m50%\r100%\x07\x1b[0m\r\n")])
    assert text == "[rank 0] 100%\n"


def test_what_the_task_wrote_to_stderr_goes_to_stderr() -> None:
    out, err = io.StringIO(), io.StringIO()
    PlainViewer(out, err).on_events([kinds.OutputLine(rank=1, stream="stderr", text="oh")])
    assert (out.getvalue(), err.getvalue()) == ("", "[rank 1] oh\n")


def test_a_run_that_is_resumed_does_not_tell_its_history_again() -> None:
    out = io.StringIO()
    viewer = PlainViewer(out, io.StringIO(), fold(demo_events(400)))
    viewer.tick(START)
    assert out.getvalue() == ""


def test_routine_events_are_told_in_the_lines_of_progress() -> None:
    lines = run_progress_of(run_lines(demo_events(400), interval_s=10.0))
    assert lines[1].endswith("valid/loss 0.2804, valid/accuracy 0.9712 at step 184  saved step 184")
    saved = kinds.CheckpointSaved(time=START, step=3, checkpoint="c", size_bytes=1, seconds=1.0, stall_s=0.0)
    assert run_lines([saved]) == ""


def test_r16_skipped_steps_are_counted_and_not_told_one_by_one() -> None:
    skipped = [kinds.StepSkipped(time=START, step=i, loss=float("nan")) for i in range(1000)]
    lines = run_lines([*demo_events(4), *skipped, *demo_events(8)[-1:]], interval_s=0.0).splitlines()
    assert len(lines) < 10
    assert "1,000 skipped steps" in lines[-1]


def test_what_the_driver_does_is_a_line_of_its_own() -> None:
    run, sweep = Flushed(), Flushed()
    PlainViewer(run, io.StringIO()).status("starting Ray on this machine", START)
    PlainSweepViewer(sweep).status("starting Ray on this machine", START)
    assert run.shown == sweep.shown == "22:13:20 starting Ray on this machine\n"


def test_r16_lines_hold_no_control_characters_whatever_things_are_called() -> None:
    evil = "\x1b[2J\x07x\n"
    trial = TrialView(name=evil, state="failed", values={evil: evil}, curve=((1, 0.5),), message=f"a\r\n{evil}b\x1b[1m")
    view = SweepView(name=evil, directory=evil, metric=evil, mode="max", num_trials=1, outcome="stopped")
    out = Flushed()
    viewer = PlainSweepViewer(out)
    viewer.status(evil, START)
    viewer.show(view, START)
    viewer.show(replace(view, trials=(trial,)), START)
    viewer.close()
    assert all(line.isprintable() for line in out.shown.splitlines())
    assert not set("\x1b\x07\r") & set(out.shown)


def test_a_sweep_that_is_resumed_does_not_tell_its_history_again() -> None:
    view = list(demo_views())[40][1]
    lines = sweep_lines([(START, view)]).splitlines()
    assert lines[0].endswith("is best, in /home/me/runs/digits; 6 of them ended before")
    assert [line[9:] for line in lines[1:]] == [
        "trial-0001 resumes with 2 workers from step 380",
        "trial-0007 resumes with 2 workers from step 142",
        "trial-0008 resumes with 2 workers from step 132",
        "trial-0009 resumes with 2 workers from step 50",
    ]


def test_a_sweep_that_broke_has_no_summary() -> None:
    views = list(demo_views())[:3]
    assert "directory  " not in sweep_lines(views)
    assert "directory  " in sweep_lines([*views, (START + 9, replace(views[-1][1], outcome="stopped"))])


def one(state: str, **facts: Any) -> SweepView:
    """A sweep whose only trial is in a state."""
    trial = TrialView(name="trial-0000", state=state, **facts)
    return SweepView(name="s", directory="/s", metric="acc", mode="max", num_trials=1, trials=(trial,))


NOTHING = SweepView(name="s", directory="/s", metric="acc", mode="max", num_trials=1)


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (NOTHING, one("running", workers=2, values={"lr": 0.1}), "started with 2 workers: lr 0.1"),
        (one("pending"), one("running", workers=1), "started with 1 worker"),
        (one("pending"), one("running", values={"lr": 0.1}), "started: lr 0.1"),
        (one("running"), one("running", workers=2, step=1), "has 2 workers instead of none, at step 1"),
        (one("running", workers=2), one("running", workers=3, step=40), "has 3 workers instead of 2, at step 40"),
        (one("running", workers=2), one("running", step=40), "has no worker instead of 2, at step 40"),
        (one("running", workers=2), one("pending", step=40), "waits for workers at step 40"),
        (one("running"), one("paused", step=40), "paused at step 40"),
        (one("paused", step=40), one("running", step=41, workers=2), "resumes with 2 workers from step 40"),
        (one("failed", step=40), one("running", step=41), "resumes from step 40"),
        (one("running"), one("completed", step=460), "completed at step 460"),
        (one("paused"), one("stopped", step=92), "stopped early at step 92"),
        (one("running"), one("failed", step=46), "failed at step 46"),
    ],
)
def test_each_change_is_a_line(before: SweepView, after: SweepView, line: str) -> None:
    assert changes(before, after) == [f"trial-0000 {line}"]


def test_a_failed_trial_says_why_in_one_line() -> None:
    (line,) = changes(one("running"), one("failed", step=46, message=FAILURE))
    assert line.endswith("failed at step 46: ValueError: the loss is not finite · raised by loss at step 46 on rank 0")


def test_a_trial_that_ends_says_its_newest_value() -> None:
    curve = ((23, 0.9), (46, 0.5))
    (line,) = changes(one("running", curve=curve), one("stopped", step=46, curve=curve))
    assert line == "trial-0000 stopped early at step 46: acc 0.5"


def test_a_trial_that_ended_before_it_was_seen_still_tells_its_hyperparameters() -> None:
    assert changes(NOTHING, one("failed", values={"lr": 9.0}, message="boom")) == [
        "trial-0000 started: lr 9",
        "trial-0000 failed at step 0: boom",
    ]


def test_a_trial_becomes_the_best_once_and_gets_better_in_silence() -> None:
    first, better = one("running", curve=((1, 0.5),)), one("running", curve=((1, 0.5), (2, 0.6)))
    assert changes(one("running"), first) == ["trial-0000 is the best: acc 0.5 at step 1"]
    assert changes(first, better) == []
    other = TrialView(name="trial-0001", state="running", curve=((1, 0.7),))
    overtaken = replace(better, trials=(*better.trials, other))
    assert changes(better, overtaken)[-1] == "trial-0001 is the best: acc 0.7 at step 1"


def test_what_moves_on_in_its_state_is_no_change() -> None:
    assert changes(one("running", step=1, workers=2), one("running", step=9, workers=2)) == []
    assert changes(one("stopped", workers=2), one("stopped")) == []
    assert changes(NOTHING, one("pending")) == []


def test_the_line_of_progress_says_how_far_the_running_ones_are() -> None:
    assert sweep_progress(NOTHING) == "0 of 1 trial ended, 0 running"
    assert sweep_progress(one("running", step=7)) == "0 of 1 trial ended, 1 running (step 7)"
    view = list(demo_views())[40][1]
    best = "best trial-0001 valid/accuracy 0.9175 at step 345"
    assert sweep_progress(view) == f"6 of 20 trials ended, 4 running (steps 50 to 380), {best}"
