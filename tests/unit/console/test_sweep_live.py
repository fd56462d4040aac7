"""The frame of a sweep fits the terminal and shows what is known."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from raytrain.console.sweep_demo import START, demo_views
from raytrain.console.sweep_live import LiveSweepViewer, render
from raytrain.events.sweep import SweepView, TrialView
from tests.golden import check


def terminal(width: int = 80, height: int = 24) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)


def draw(view: SweepView, width: int = 80, now: float | None = START + 30) -> str:
    console = terminal(width)
    with console.capture() as capture:
        console.print(render(view, width, now))
    return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())


def demo(second: int, num_trials: int = 20) -> SweepView:
    return list(demo_views(num_trials))[second][1]


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize(("num_trials", "second"), [(20, 0), (20, 2), (20, 40), (40, 100), (40, -1)])
def test_the_frame_of_the_canned_sweep_is_as_agreed(num_trials: int, second: int, width: int) -> None:
    name = f"{second:03d}" if second >= 0 else "end"
    frame = draw(demo(second, num_trials), width, START + second if second >= 0 else None)
    check(f"sweep_live_{num_trials}_{name}_{width}.txt", frame)


@pytest.mark.parametrize("width", [80, 100])
def test_a_frame_with_many_hyperparameters_is_as_agreed(width: int) -> None:
    view = demo(40)
    more = {"dropout": 0.1, "run.global_batch": 64, "act": "relu", "betas": (0.9, 0.999)}
    trials = [replace(trial, values={**trial.values, **more, "warmup": i}) for i, trial in enumerate(view.trials)]
    check(f"sweep_live_many_hyperparameters_{width}.txt", draw(replace(view, trials=tuple(trials)), width))


def crowded() -> SweepView:
    """A sweep with many trials, long names and values, and numbers of all sizes."""
    values = {f"a name of a hyperparameter {i}": "a long value " * 9 for i in range(20)}
    trials = [
        TrialView(
            name=f"trial-{i:04d} with a very long name",
            state=("pending", "running", "paused", "completed", "stopped", "failed")[i % 6],
            values=values,
            workers=10**4,
            step=10**8,
            num_steps=10**9,
            curve=tuple((step, -1.2345678e-300 * step if step % 7 else math.nan) for step in range(i)),
            message="a long message " * 99,
        )
        for i in range(300)
    ]
    return SweepView(
        name="name " * 40, directory="/d" * 99, metric="metric " * 20, mode="min", num_trials=10**4, trials=tuple(trials)
    )


@pytest.mark.parametrize("width", [1, 20, 40, 80, 200])
def test_the_frame_always_fits(width: int) -> None:
    lines = draw(crowded(), width).splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= min(width, 140)


def test_without_room_for_workers_and_hyperparameters_the_metric_is_still_there() -> None:
    (line,) = [line for line in draw(demo(40), 40).splitlines() if line.startswith("0001 *")]
    assert line == "0001 *  running  380/460  0.9163    ▁▇██"


EVIL = "50%\r\x1b[2J\x07[bold]red[/bold] :smile:\n"
SHOWN = "[bold]red[/bold] :smile:"


def evil() -> SweepView:
    failed = TrialView(name=f"t{EVIL}", state="failed", values={EVIL: EVIL, "n": 1}, curve=((1, 0.5),), message=f"a\n{EVIL}")
    return SweepView(name=EVIL, directory=EVIL, metric=EVIL, mode="max", num_trials=1, trials=(failed,), outcome="stopped")


def test_control_characters_do_not_reach_the_terminal_and_markup_stays_as_it_is() -> None:
    frame = draw(evil(), 140)
    assert all(line.isprintable() for line in frame.splitlines())
    assert (
        frame.count(SHOWN) == 9
    )  # 2 in the header, 4 in the best trial's line, 2 in that of the failed one, 1 above the curve


def test_what_the_viewer_leaves_on_the_screen_holds_no_control_characters_of_others() -> None:
    console = terminal(200)
    viewer = LiveSweepViewer(console)
    viewer.say(EVIL, START)
    viewer.show(evil(), START)
    viewer.close()
    screen = written(console)
    assert screen.startswith(f"22:13:20  {SHOWN}\n")
    assert f"failed        {SHOWN} at step 0: {SHOWN}\n" in screen
    assert "\x1b[2J" not in screen
    assert "\x07" not in screen


def written(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_frame_is_drawn_at_most_four_times_a_second() -> None:
    console = terminal()
    viewer = LiveSweepViewer(console)
    drawn = []
    for i in range(20):
        before = written(console)
        viewer.show(demo(2), START + i / 16)
        drawn.append(written(console) != before)
    assert drawn == [i % 4 == 0 for i in range(20)]


def test_what_the_driver_says_stands_above_the_frame() -> None:
    console = terminal()
    viewer = LiveSweepViewer(console)
    viewer.say("starting Ray on this machine", START)
    viewer.show(demo(2), START)
    viewer.say("the cluster has 3 nodes now", START + 0.1)
    screen = written(console)
    assert screen.startswith("22:13:20 starting Ray on this machine\n")
    assert screen.rindex("the cluster has 3 nodes now") < screen.rindex("valid/accuracy")


def test_the_last_frame_and_the_summary_stay_on_the_screen() -> None:
    console = terminal(100)
    viewer = LiveSweepViewer(console)
    viewer.show(demo(100), START + 100)
    viewer.show(demo(-1), START + 100.1)
    viewer.close()
    screen = written(console)
    assert "20 of 20 trials ended\n" in screen
    assert screen.rindex("best         trial-0011, valid/accuracy 0.9635 at step 437") > screen.rindex(
        "and 7 more: 7 stopped"
    )


def test_a_sweep_that_broke_leaves_its_last_frame_without_a_summary() -> None:
    console = terminal(100)
    viewer = LiveSweepViewer(console)
    viewer.show(demo(40), START + 40)
    viewer.close()
    last = written(console).splitlines()[-2:]
    assert last == ["and 10 more: 10 pending", "\x1b[?25h"]  # which shows the cursor again


def test_a_viewer_that_was_never_shown_anything_can_be_closed() -> None:
    console = terminal()
    LiveSweepViewer(console).close()
    assert written(console).strip() == ""


def test_a_taller_terminal_shows_more_trials_and_a_lower_one_fewer() -> None:
    shown = {}
    for height in (12, 24, 60):
        console = terminal(100, height)
        viewer = LiveSweepViewer(console)
        viewer.show(demo(100, 40), START)
        shown[height] = sum(line[:4].isdigit() for line in written(console).splitlines())
    assert shown == {12: 3, 24: 13, 60: 19}
