"""The frames of a run and of a sweep fit the terminal and show what is known."""

from __future__ import annotations

import functools
import io
import math
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from raytrain.console.live import LiveSweepViewer, LiveViewer, run_frame, sweep_frame
from raytrain.console.messages import take
from raytrain.events import kinds
from raytrain.events.sweep import SweepView, TrialView
from raytrain.events.view import RunView, fold, reduce
from tests.golden import check
from tests.support.demo_run import START, demo_events
from tests.support.demo_sweep import demo_views


def terminal(width: int = 80, height: int = 24) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)


def written(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def drawn(frame: RenderableType, width: int = 80) -> str:
    console = terminal(width)
    with console.capture() as capture:
        console.print(frame)
    return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())


def of_run(view: RunView, width: int = 80, now: float | None = START + 30) -> str:
    return drawn(run_frame(view, width, now), width)


def of_sweep(view: SweepView, width: int = 80, now: float | None = START + 30) -> str:
    return drawn(sweep_frame(view, width, now), width)


def watched(events: list[kinds.Event]) -> RunView:
    return functools.reduce(take, events, RunView())


def sweep(second: int, num_trials: int = 20) -> SweepView:
    return list(demo_views(num_trials))[second][1]


def searched_much() -> SweepView:
    more = {"dropout": 0.1, "run.global_batch": 64, "act": "relu", "betas": (0.9, 0.999)}
    view = sweep(40)
    trials = [replace(trial, values={**trial.values, **more, "warmup": i}) for i, trial in enumerate(view.trials)]
    return replace(view, trials=tuple(trials))


FRAMES = {
    **{f"live_{num_steps:03d}": lambda n=num_steps: of_run(watched(demo_events(n))) for num_steps in (0, 202, 262, 412)},
    "sweep_live_20_002_80": lambda: of_sweep(sweep(2), 80, START + 2),
    "sweep_live_40_100_80": lambda: of_sweep(sweep(100, 40), 80, START + 100),
    "sweep_live_40_end_100": lambda: of_sweep(sweep(-1, 40), 100, None),
    "sweep_live_many_hyperparameters_80": lambda: of_sweep(searched_much(), 80),
    "sweep_live_many_hyperparameters_100": lambda: of_sweep(searched_much(), 100),
}


@pytest.mark.parametrize("name", FRAMES)
def test_the_frame_is_as_agreed(name: str) -> None:
    check(f"{name}.txt", FRAMES[name]())


def test_a_frame_of_nothing_can_be_drawn() -> None:
    assert of_run(RunView()).startswith("raytrain  starting")


def crowded_run() -> RunView:
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


def crowded_sweep() -> SweepView:
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
    many, names = tuple(trials), {"name": "name " * 40, "directory": "/d" * 99, "metric": "metric " * 20}
    return SweepView(mode="min", num_trials=10**4, trials=many, **names)


@pytest.mark.parametrize("width", [1, 40, 80, 200])
def test_r16_the_frame_always_fits(width: int) -> None:
    for frame, max_width in ((of_run(crowded_run(), width), 100), (of_sweep(crowded_sweep(), width), 140)):
        lines = frame.splitlines()
        assert len(lines) <= 23
        assert max(map(len, lines)) <= min(width, max_width)


def test_a_lost_worker_is_marked_until_the_next_generation() -> None:
    lost = kinds.WorkerLost(worker="w1", node="10.0.0.12", pid=4121, reason="killed")
    frame = of_run(reduce(fold(demo_events(100)), lost))
    (row,) = [line for line in frame.splitlines() if line.startswith("1     w1")]
    assert row.endswith("lost")


def test_the_frame_says_where_the_time_went_as_far_as_it_fits() -> None:
    waiting = kinds.WaitingForWorkers(time=START + 12, have=0, need=1, reason="none is there")
    lost = kinds.WorkerLost(time=START + 10, worker="w1", node="10.0.0.12", pid=4121, reason="killed")
    view = fold([*demo_events(92), lost, waiting])
    (line,) = [line for line in of_run(view, now=START + 32).splitlines() if line.startswith("goodput")]
    assert line == "goodput  14.4 %    waiting for workers 20.0 s  starting 5.0 s  training 4.6 s"
    (line,) = [line for line in of_run(view, 40, now=START + 32).splitlines() if line.startswith("goodput")]
    assert line == "goodput  14.4 %"


def test_routine_events_do_not_push_out_the_notes() -> None:
    lost = kinds.WorkerLost(time=START, worker="w1", node="10.0.0.12", pid=4121, reason="killed")
    saved = [kinds.CheckpointSaved(step=i, checkpoint="c", size_bytes=1, seconds=1.0, stall_s=0.0) for i in range(50)]
    frame = of_run(watched([*demo_events(8), lost, *saved]))
    assert "lost worker w1" in frame
    assert "saved    step 49" in frame


def test_r16_printed_lines_are_above_the_frame_and_stderr_goes_to_its_file() -> None:
    console, err = terminal(), io.StringIO()
    viewer = LiveViewer(console, err)
    viewer.status("starting Ray on this machine", START)
    assert "starting Ray on this machine" in written(console)
    assert "step 0/0" not in written(console)
    viewer.on_events([kinds.OutputLine(rank=3, stream="stdout", text="[bold]not markup[/bold] 3.5\r\n")])
    viewer.on_events([kinds.OutputLine(rank=4, stream="stderr", text="oh")])
    viewer.close()
    assert "[rank 3] [bold]not markup[/bold] 3.5\n" in written(console)
    assert err.getvalue() == "[rank 4] oh\n"


def test_the_last_frame_and_the_summary_stay_on_the_screen() -> None:
    console = terminal()
    viewer = LiveViewer(console, io.StringIO())
    viewer.on_events(demo_events(100))
    viewer.tick(START + 10)
    viewer.on_events(demo_events(460, ended=True))
    viewer.tick(START + 40)
    viewer.close()
    screen = written(console)
    assert screen.rindex("checkpoints  /home/me/runs/digits/checkpoints") > screen.rindex("logical workers")
    assert "step 460/460" in screen


def test_viewers_that_were_shown_nothing_leave_nothing() -> None:
    for viewer in (LiveViewer(terminal(), io.StringIO()), LiveSweepViewer(terminal())):
        viewer.close()
        assert written(viewer._console).strip() == ""


def test_r10_a_resumed_run_shows_its_earlier_curve_but_not_how_it_ended_before() -> None:
    console = terminal()
    viewer = LiveViewer(console, io.StringIO(), fold(demo_events(460, ended=True)))
    viewer.status("starting Ray on this machine", START + 100)
    assert "█" in written(console)
    assert "completed" not in written(console)
    viewer.close()
    assert "checkpoints  /" not in written(console)


def test_without_room_for_workers_and_hyperparameters_the_metric_is_still_there() -> None:
    (line,) = [line for line in of_sweep(sweep(40), 40).splitlines() if line.startswith("0001 *")]
    assert line == "0001 *  running  380/460  0.9163    ▁▇██"


EVIL = "50%\r\x1b[2J\x07[bold]red[/bold] :smile:\n"
SHOWN = "[bold]red[/bold] :smile:"


def test_r16_names_hold_no_control_characters_and_no_markup_on_the_screen() -> None:
    failed = TrialView(name=f"t{EVIL}", state="failed", values={EVIL: EVIL, "n": 1}, curve=((1, 0.5),), message=f"a\n{EVIL}")
    view = SweepView(
        name=EVIL, directory=EVIL, metric=EVIL, mode="max", num_trials=1, trials=(failed,), outcome="stopped", started=START
    )
    frame = of_sweep(view, 140)
    assert all(line.isprintable() for line in frame.splitlines())
    assert frame.count(SHOWN) == 9  # 2 in the header, 4 of the best trial, 2 of the failed one, 1 above the curve
    console = terminal(200)
    viewer = LiveSweepViewer(console)
    viewer.status(EVIL, START)
    viewer.show(view, START)
    viewer.close()
    screen = written(console)
    assert screen.startswith(f"22:13:20  {SHOWN}\n")
    assert f"failed        {SHOWN} at step 0: {SHOWN}\n" in screen
    assert not {"\x1b[2J", "\x07"} & set(screen)
    assert "\x1b[2J" not in screen


def test_a_sweep_is_drawn_at_most_four_times_a_second() -> None:
    console = terminal()
    viewer = LiveSweepViewer(console)
    changed = []
    for i in range(12):
        before = written(console)
        viewer.show(sweep(2), START + i / 16)
        changed.append(written(console) != before)
    assert changed == [i % 4 == 0 for i in range(12)]


@pytest.mark.parametrize(("height", "num_rows"), [(12, 3), (24, 13), (60, 19)])
def test_a_taller_terminal_shows_more_trials(height: int, num_rows: int) -> None:
    console = terminal(100, height)
    LiveSweepViewer(console).show(sweep(100, 40), START)
    assert sum(line[:4].isdigit() for line in written(console).splitlines()) == num_rows


def test_a_sweep_leaves_its_last_frame_and_a_summary_only_if_it_ended() -> None:
    ended, broken = terminal(100), terminal(100)
    for console, second in ((ended, -1), (broken, 40)):
        viewer = LiveSweepViewer(console)
        viewer.show(sweep(2), START)
        viewer.show(sweep(second), START + 0.1)
        viewer.close()
    assert written(ended).rindex("best         trial-0011, ") > written(ended).rindex("and 7 more: 7 stopped")
    assert written(broken).splitlines()[-2:] == ["and 10 more: 10 pending", "\x1b[?25h"]  # which shows the cursor again
