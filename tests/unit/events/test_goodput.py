"""Every second of a run is in one class, and the classes add up to the wall time, whatever the events are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain.events import kinds
from raytrain.events.goodput import TITLES, GoodputAccount, Ledger, account, fold, reduce

T = 1_700_000_000.0
"""Unix time in seconds at which the runs of these tests start; all times below are seconds after it."""
SIZES = {"steps_per_epoch": 10, "rows_per_epoch": 100, "global_batch": 10, "num_logical": 2, "workers": (1, 2)}


def started(at: float, num_steps: int = 100) -> kinds.RunStarted:
    return kinds.RunStarted(time=T + at, name="r", directory="/r", num_steps=num_steps, **SIZES)  # type: ignore[arg-type]


def formed(at: float, workers: str = "ab", cause: str = "start", **parts: float) -> kinds.GenerationFormed:
    members = [kinds.Member(worker=name, rank=rank, node="n", pid=1, logical=[rank]) for rank, name in enumerate(workers)]
    return kinds.GenerationFormed(time=T + at, generation=1, step=0, members=members, cause=cause, **parts)


def steps(first: int, *finished: float, waits: Iterable[float] = ()) -> kinds.StepsDone:
    lists = dict.fromkeys(("losses", "weights", "rows", "learning_rates"), [1] * len(finished))
    times = [T + at for at in finished]
    return kinds.StepsDone(time=max(times, default=T), first_step=first, finished=times, data_waits=list(waits), **lists)  # type: ignore[arg-type]


def evaluated(at: float, step: int, seconds: float) -> kinds.EvaluationDone:
    return kinds.EvaluationDone(time=T + at, step=step, metrics={}, rows=1, seconds=seconds)


def saved(at: float, step: int, stall_s: float) -> kinds.CheckpointSaved:
    return kinds.CheckpointSaved(time=T + at, step=step, checkpoint="c", size_bytes=1, seconds=0.1, stall_s=stall_s)


def failed(at: float, step: int) -> kinds.CheckpointFailed:
    return kinds.CheckpointFailed(time=T + at, step=step, reason="disk full")


def lost(at: float, worker: str) -> kinds.WorkerLost:
    return kinds.WorkerLost(time=T + at, worker=worker, node="n", pid=1, reason="killed")


def restored(at: float, step: int) -> kinds.StateRestored:
    return kinds.StateRestored(time=T + at, step=step, checkpoint="c")


def waiting(at: float) -> kinds.WaitingForWorkers:
    return kinds.WaitingForWorkers(time=T + at, have=0, need=1, reason="all lost")


def ended(at: float, step: int) -> kinds.RunEnded:
    return kinds.RunEnded(time=T + at, outcome="completed", step=step)


def output(at: float) -> kinds.OutputLine:
    return kinds.OutputLine(time=T + at, rank=0, stream="stdout", text="")


PLAIN = [started(0, num_steps=4), restored(4, 0), formed(5), steps(0, 6, 7, waits=[0.25, 0.5]), steps(2, 8, 9)]
BEGUN = [started(0), formed(1), steps(0, 2)]
LOST = [*BEGUN, lost(2.5, "b")]
KILLED = [started(0), formed(1), steps(0, 2, 3, 4), output(4.5)]
RESUMED = [*KILLED, started(100), restored(101, 1), formed(102)]
LOSS = {"pause_s": 4.0, "redone_s": 0.5, "detecting_s": 1.0, "waiting_s": 1.5}
REPEATED = [started(0), formed(1), steps(0, 2, 3, 4), started(100), restored(100, 0), formed(101), steps(0, 102, 103)]
TWO_FAILURES = [
    *(
        started(0),
        formed(1, "abc"),
        steps(0, 2),
        lost(3, "c"),
        formed(4, "ab", "loss", pause_s=2, redone_s=0.5, detecting_s=1),
    ),
    *(lost(5, "b"), formed(7, "a", "loss", pause_s=5, redone_s=0.5, detecting_s=1, waiting_s=2), steps(1, 8)),
]
ALL_DIED = [started(0), formed(1), steps(0, 2, 3, 4), lost(5, "a"), lost(5, "b"), restored(9, 1)]
LATE_EVALUATION = [*BEGUN, evaluated(5, 1, 3.0), formed(8, "a", "loss", pause_s=6, redone_s=1, detecting_s=4.5), steps(1, 9)]
CHECKPOINTS = [
    *(started(0, num_steps=4), formed(1), steps(0, 2), evaluated(2.4, 1, 0.375), steps(1, 3), saved(3.4, 1, 0.125)),
    *(steps(2, 4), saved(4.2, 3, 0.25), steps(3, 5), evaluated(6, 4, 1.0), saved(6.5, 4, 0.25), ended(7, 4)),
]


SCENARIOS: dict[str, tuple[list[kinds.Event], float | None, str]] = {
    "no events": ([], 100, ""),
    "a driver that is starting": (PLAIN[:1], 3, "starting 3"),
    "a complete run": ([*PLAIN, ended(9.5, 4)], 100, "starting 5 training 3.25 data_wait 0.75 stopping 0.5"),
    "a running run at its last event": (PLAIN[:-1], None, "starting 5 training 1.25 data_wait 0.75"),
    "a running run later": (PLAIN[:-1], 10, "starting 5 training 4.25 data_wait 0.75"),
    "the last checkpoint is being written": (PLAIN, 10, "starting 5 training 3.25 data_wait 0.75 checkpoint_stall 1"),
    "the last checkpoint is written": (
        *([*PLAIN, saved(9.5, 4, 0.0)], 10),
        "starting 5 training 3.25 data_wait 0.75 checkpoint_stall 0.5 stopping 0.5",
    ),
    "the last checkpoint failed": (
        *([*PLAIN, failed(11, 4), ended(11, 4)], None),
        "starting 5 training 3.25 data_wait 0.75 checkpoint_stall 2",
    ),
    "a pause after a loss has parts": (
        *([*BEGUN, steps(1, 3), lost(4, "b"), formed(7.4, "a", "loss", **LOSS), steps(2, 8)], None),
        "starting 1 training 3 redoing 0.5 detecting 1 waiting 1.5 reforming 1",
    ),
    "a pause ends when the leader says": (
        *([*BEGUN, formed(2.9, cause="join", pause_s=0.25), steps(1, 2.5, 3)], None),
        "starting 1 reforming 0.25 training 1.75",
    ),
    "two generations failed": (TWO_FAILURES, None, "starting 1 training 2 redoing 0.5 detecting 1 waiting 2 reforming 1.5"),
    "an evaluation before the loss": (
        *(LATE_EVALUATION, None),
        "starting 1 training 2 evaluation 3 redoing 1 detecting 1.5 reforming 0.5",
    ),
    "a lost member": (LOST, 4, "starting 1 training 1 reforming 2"),
    "too few workers": ([*LOST, waiting(7), waiting(8)], 10, "starting 1 training 1 reforming 5 waiting 3"),
    "the end while waiting": ([*LOST, waiting(7), ended(10, 1)], None, "starting 1 training 1 reforming 5 waiting 3"),
    "the loss of a former member": (
        *([*BEGUN, formed(2.1, "a", "loss", pause_s=0.1), lost(2.5, "b")], 4),
        "starting 1 training 2.9 reforming 0.1",
    ),
    "a lost member after its last step": ([*LOST, steps(1, 3)], 4, "starting 1 training 3"),
    "all workers died": (
        *([*ALL_DIED, formed(10, "c", "loss", pause_s=3, waiting_s=2), steps(1, 11, 12, 13)], None),
        "starting 1 training 4 waiting 2 reforming 4 redoing 2",
    ),
    "a killed and resumed driver": (
        *([*RESUMED, steps(1, 103, 104), steps(3, 105), ended(106, 4)], None),
        "starting 3 training 4 redoing 2.5 stopping 1",
    ),
    "a resumed driver repeats steps": (RESUMED, 103.5, "starting 3 training 3 redoing 2"),
    "steps repeated without a restore event": (
        *([*KILLED, started(100), formed(101), steps(0, 102)], None),
        "starting 2 training 3 redoing 1.5",
    ),
    "a driver killed before it trained": ([started(0), waiting(5), started(50), formed(52)], None, "starting 7"),
    "events between two drivers": (
        *([steps(0, -5), *PLAIN, ended(9.5, 4), output(20), steps(4, 30), saved(31, 4, 1.0)], 100),
        "starting 5 training 3.25 data_wait 0.75 stopping 0.5",
    ),
    "evaluations and checkpoints": (
        *(CHECKPOINTS, None),
        "starting 1 training 3.25 evaluation 1.375 checkpoint_stall 0.875 stopping 0.5",
    ),
    "a stall of a repeated step": (
        *([*REPEATED, saved(103, 1, 0.5)], None),
        "starting 2 training 3 redoing 1.5 checkpoint_stall 0.5",
    ),
    "steps reported twice": ([*PLAIN, steps(0, 6, 7), steps(4, 3, 10)], None, "starting 5 training 4.25 data_wait 0.75"),
    "waits of another length": ([started(0), formed(1), steps(0, 2, 3, waits=[0.5])], None, "starting 1 training 2"),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_interval_is_accounted_to_its_classes(name: str) -> None:
    events, now, text = SCENARIOS[name]
    ledger, words = fold(events).at(None if now is None else T + now), text.split()
    expected = Ledger(**{f"{word}_s": float(value) for word, value in zip(words[::2], words[1::2], strict=True)})
    assert ledger.seconds() == pytest.approx(expected.seconds(), abs=1e-5)


def test_a_killed_drivers_session_ends_at_its_last_event() -> None:
    closed = fold(KILLED).closed()
    assert closed.at(T + 90).known() == pytest.approx({"starting_s": 1, "training_s": 3, "redoing_s": 0.5})
    assert (fold(RESUMED).sessions, fold([*RESUMED, ended(106, 4)]).at().wall_s) == (2, pytest.approx(10.5))


def test_goodput_is_training_time_by_wall_time() -> None:
    ledger = Ledger(training_s=3.0, redoing_s=1.0)
    assert (ledger.wall_s, ledger.goodput) == (4.0, pytest.approx(0.75))
    assert (Ledger().wall_s, Ledger().goodput) == (0.0, 0.0)
    assert list(TITLES) == [field.name for field in fields(Ledger)]


def test_attributed_parts_never_exceed_the_interval() -> None:
    parts = Ledger(data_wait_s=2.0, evaluation_s=2.0, waiting_s=2.0)
    assert account(Ledger(training_s=1.0), parts, 8.0, "training_s") == Ledger(
        training_s=3.0, data_wait_s=2.0, evaluation_s=2.0, waiting_s=2.0
    )
    assert account(Ledger(), parts, 3.0, "training_s") == Ledger(data_wait_s=2.0, evaluation_s=1.0)
    assert account(Ledger(), parts, -1.0, "training_s") == Ledger()


seconds = st.floats(-10, 1000) | st.sampled_from([0.0, 1e-9, math.inf, -math.inf, math.nan, 1e300])
times = st.floats(T, T + 5000) | st.sampled_from([0.0, math.nan, math.inf, T, T + 10])
numbers = st.integers(0, 8)
workers = st.text("abc", max_size=3)


def events_of_any_kind() -> st.SearchStrategy[kinds.Event]:
    def timed(event: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.builds(lambda one, time: type(one)(**{**vars(one), "time": time}), event, times)

    parts = st.fixed_dictionaries(dict.fromkeys(LOSS, seconds))
    moments = st.lists(st.floats(-10, 5000) | st.sampled_from([math.nan, math.inf]), max_size=5)
    return st.one_of(
        timed(st.builds(lambda n: started(0, n), numbers)),
        timed(st.builds(lambda names, kwargs: formed(0, names, "loss", **kwargs), workers, parts)),
        timed(st.builds(lambda n, at, waits: steps(n, *at, waits=waits), numbers, moments, st.lists(seconds, max_size=5))),
        timed(st.builds(lambda n, s: evaluated(0, n, s) if n % 2 else saved(0, n, s), numbers, seconds)),
        timed(st.builds(lambda n: failed(0, n) if n % 2 else restored(0, n), numbers)),
        timed(st.builds(lambda name: lost(0, name), workers)),
        timed(st.just(waiting(0)) | st.just(output(0)) | st.just(ended(0, 1))),
    )


def moments_of(event: kinds.Event) -> list[float]:
    finished = event.finished if isinstance(event, kinds.StepsDone) else []
    return [at for at in (event.time, *finished) if at and math.isfinite(at)]


def wall_time(events: list[kinds.Event], now: float) -> float:
    """By definition, session by session: from RunStarted to the latest time that the session mentions."""
    starts = [i for i, event in enumerate(events) if isinstance(event, kinds.RunStarted)]
    total, before = 0.0, 0.0
    for first, stop in itertools.pairwise([*starts, len(events)]):
        session = events[first + 1 : stop]
        end = next((i for i, event in enumerate(session) if isinstance(event, kinds.RunEnded)), None)
        start = (moments_of(events[first]) or [before])[0]
        before = max([start, *(at for event in session[: end if end is None else end + 1] for at in moments_of(event))])
        total += max(before, now if stop == len(events) and end is None else before) - start
    return total


@settings(max_examples=250, deadline=None)
@given(events=st.lists(events_of_any_kind(), max_size=40), now=st.floats(0, 6000))
def test_the_classes_add_up_to_the_wall_time_of_any_events(events: list[kinds.Event], now: float) -> None:
    ledger = fold(events).at(T + now)
    assert ledger.wall_s == pytest.approx(wall_time(events, T + now), abs=1e-6)
    assert sum(ledger.seconds().values()) == pytest.approx(ledger.wall_s, abs=1e-6)
    assert min(ledger.seconds().values()) >= 0
    assert 0 <= ledger.goodput <= 1


def test_many_steps_lose_no_time_to_rounding_and_the_account_stays_small() -> None:
    account: GoodputAccount = fold([started(0), formed(1)])
    for first in range(0, 200_000, 1000):
        account = reduce(account, steps(first, *(1 + 0.037 * (step + 1) for step in range(first, first + 1000))))
    assert account.at().wall_s == pytest.approx(7_401.0, abs=1e-6)
    assert len(repr(account)) < 2000
