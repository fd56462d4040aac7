"""Every second of a run is in one class, and the sum is the wall time, whatever the events say."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain.events import kinds
from raytrain.events.bookkeeping import Books, fold, reduce
from raytrain.events.ledger import Ledger

T = 1_700_000_000.0
"""Unix time in seconds at which the runs of these tests begin; all times below are seconds after it."""


def started(at: float, num_steps: int = 100) -> kinds.RunStarted:
    return kinds.RunStarted(
        time=T + at,
        name="r",
        directory="/r",
        num_steps=num_steps,
        steps_per_epoch=10,
        rows_per_epoch=100,
        global_batch=10,
        num_logical=2,
        workers=(1, 2),
    )


def formed(at: float, workers: str = "ab", cause: str = "start", **parts: float) -> kinds.GenerationFormed:
    members = [kinds.Member(worker=name, rank=rank, node="n", pid=1, logical=[rank]) for rank, name in enumerate(workers)]
    return kinds.GenerationFormed(
        time=T + at, generation=1, step=0, members=members, cause=cause, **{"pause_s": 0.0, **parts}
    )


def steps(first: int, *finished: float, waits: Iterable[float] = ()) -> kinds.StepsDone:
    ones = [1.0] * len(finished)
    return kinds.StepsDone(
        time=T + max(finished, default=0.0),
        first_step=first,
        losses=ones,
        weights=ones,
        rows=[1] * len(finished),
        learning_rates=ones,
        finished=[T + at for at in finished],
        data_waits=list(waits),
    )


def evaluated(at: float, step: int, seconds: float) -> kinds.EvaluationDone:
    return kinds.EvaluationDone(time=T + at, step=step, metrics={}, rows=1, seconds=seconds)


def saved(at: float, step: int, stall_s: float) -> kinds.CheckpointSaved:
    return kinds.CheckpointSaved(time=T + at, step=step, checkpoint="c", size_bytes=1, seconds=0.1, stall_s=stall_s)


def lost(at: float, worker: str) -> kinds.WorkerLost:
    return kinds.WorkerLost(time=T + at, worker=worker, node="n", pid=1, reason="killed")


def restored(at: float, step: int) -> kinds.StateRestored:
    return kinds.StateRestored(time=T + at, step=step, checkpoint="c")


def short(at: float) -> kinds.WaitingForWorkers:
    return kinds.WaitingForWorkers(time=T + at, have=0, need=1, reason="none is there")


def ended(at: float, step: int) -> kinds.RunEnded:
    return kinds.RunEnded(time=T + at, outcome="completed", step=step)


def printed(at: float) -> kinds.Printed:
    return kinds.Printed(time=T + at, rank=0, stream="stdout", text="")


def check(books: Books, now: float | None = None, **seconds: float) -> None:
    """Compares the ledger with what is left after its classes' `_s`; those that are not named must be 0."""
    ledger = books.at(None if now is None else T + now)
    assert ledger.seconds() == pytest.approx(
        Ledger(**{f"{name}_s": value for name, value in seconds.items()}).seconds(), abs=1e-5
    )


PLAIN = [started(0, num_steps=4), restored(4, 0), formed(5), steps(0, 6, 7, waits=[0.25, 0.5]), steps(2, 8, 9)]


def test_a_plain_run_starts_trains_and_stops() -> None:
    books = fold([*PLAIN, ended(9.5, 4)])
    check(books, starting=5, training=3.25, data_wait=0.75, stopping=0.5)
    assert (books.sessions, books.at().wall_s) == (1, pytest.approx(9.5))
    assert books.at().goodput == pytest.approx(3.25 / 9.5)


def test_the_time_since_the_last_event_counts_while_the_run_goes_on() -> None:
    check(fold([]), 100)
    check(fold(PLAIN[:1]), 3, starting=3)
    check(fold(PLAIN[:-1]), starting=5, training=1.25, data_wait=0.75)
    check(fold(PLAIN[:-1]), 10, starting=5, training=4.25, data_wait=0.75)
    check(fold(PLAIN), 10, starting=5, training=3.25, data_wait=0.75, checkpoint_stall=1)
    check(
        fold([*PLAIN, saved(9.5, 4, 0.0)]), 10, starting=5, training=3.25, data_wait=0.75, checkpoint_stall=0.5, stopping=0.5
    )
    check(fold([*PLAIN, ended(9.5, 4)]), 100, starting=5, training=3.25, data_wait=0.75, stopping=0.5)


def test_a_pause_after_a_loss_is_split_in_its_parts() -> None:
    loss = {"pause_s": 4.0, "redone_s": 0.5, "detecting_s": 1.0, "waiting_s": 1.5}
    events = [started(0), formed(1), steps(0, 2, 3), lost(4, "b"), formed(7.4, "a", "loss", **loss), steps(2, 8)]
    check(fold(events), starting=1, training=3, redoing=0.5, detecting=1, waiting=1.5, reforming=1)


def test_a_pause_ends_when_the_leader_says_even_if_its_event_comes_late() -> None:
    events = [started(0), formed(1), steps(0, 2), formed(2.9, cause="join", pause_s=0.25), steps(1, 2.5, 3)]
    check(fold(events), starting=1, reforming=0.25, training=1.75)


def test_a_pause_in_which_two_generations_failed_counts_once() -> None:
    first = formed(4, "ab", "loss", pause_s=2.0, redone_s=0.5, detecting_s=1.0)
    second = formed(7, "a", "loss", pause_s=5.0, redone_s=0.5, detecting_s=1.0, waiting_s=2.0)
    events = [started(0), formed(1, "abc"), steps(0, 2), lost(3, "c"), first, lost(5, "b"), second, steps(1, 8)]
    check(fold(events), starting=1, training=2, redoing=0.5, detecting=1, waiting=2, reforming=1.5)


def test_what_was_due_before_the_loss_is_no_time_of_detecting() -> None:
    loss = {"pause_s": 6.0, "redone_s": 1.0, "detecting_s": 4.5}
    events = [started(0), formed(1), steps(0, 2), evaluated(5, 1, 3.0), formed(8, "a", "loss", **loss), steps(1, 9)]
    check(fold(events), starting=1, training=2, evaluation=3, redoing=1, detecting=1.5, reforming=0.5)


def test_while_a_member_is_lost_or_too_few_are_there_nobody_trains() -> None:
    events = [started(0), formed(1), steps(0, 2), lost(2.5, "b")]
    check(fold(events), 4, starting=1, training=1, reforming=2)
    check(fold([*events, short(7), short(8)]), 10, starting=1, training=1, reforming=5, waiting=3)
    check(fold([*events, short(7), ended(10, 1)]), starting=1, training=1, reforming=5, waiting=3)


def test_a_loss_of_somebody_who_does_not_train_any_more_changes_nothing() -> None:
    events = [started(0), formed(1), steps(0, 2), formed(2.1, "a", "loss", pause_s=0.1), lost(2.5, "b")]
    check(fold(events), 4, starting=1, training=2.9, reforming=0.1)
    check(fold([*events[:3], lost(2.5, "b"), steps(1, 3)]), 4, starting=1, training=3)


def test_after_all_workers_died_steps_are_done_again() -> None:
    again = formed(10, "c", "loss", pause_s=3.0, waiting_s=2.0)
    events = [started(0), formed(1), steps(0, 2, 3, 4), lost(5, "a"), lost(5, "b"), restored(9, 1), again]
    check(fold([*events, steps(1, 11, 12, 13)]), starting=1, training=4, waiting=2, reforming=4, redoing=2)


def test_a_killed_driver_ends_its_session_at_its_last_event_and_its_steps_are_done_again() -> None:
    first = [started(0), formed(1), steps(0, 2, 3, 4), printed(4.5)]
    second = [started(100), restored(101, 1), formed(102), steps(1, 103, 104), steps(3, 105), ended(106, 4)]
    books = fold([*first, *second])
    check(books, starting=3, training=4, redoing=2.5, stopping=1)
    assert (books.sessions, books.at().wall_s) == (2, pytest.approx(10.5))
    check(fold(first).ended(), 90, starting=1, training=3, redoing=0.5)
    check(fold([*first, *second[:3]]), 103.5, starting=3, training=3, redoing=2)


def test_a_driver_that_was_killed_before_it_trained_was_starting() -> None:
    check(fold([started(0), short(5), started(50), formed(52)]), starting=7)


def test_between_two_drivers_nothing_counts() -> None:
    books = fold([steps(0, -5), *PLAIN, ended(9.5, 4), printed(20), steps(4, 30), saved(31, 4, 1.0)])
    check(books, 100, starting=5, training=3.25, data_wait=0.75, stopping=0.5)


def test_evaluations_and_checkpoints_have_their_own_time() -> None:
    events = [
        *(started(0, num_steps=4), formed(1), steps(0, 2), evaluated(2.4, 1, 0.375), steps(1, 3)),
        saved(3.4, 1, 0.125),  # the step after it is settled already
        *(steps(2, 4), saved(4.2, 3, 0.25), steps(3, 5)),
        *(evaluated(6, 4, 1.0), saved(6.5, 4, 0.25), ended(7, 4)),
    ]
    check(fold(events), starting=1, training=3.25, evaluation=1.375, checkpoint_stall=0.875, stopping=0.5)


def test_a_last_checkpoint_that_failed_has_cost_its_time_too() -> None:
    failed = kinds.CheckpointFailed(time=T + 11, step=4, reason="disk full")
    check(fold([*PLAIN, failed, ended(11, 4)]), starting=5, training=3.25, data_wait=0.75, checkpoint_stall=2)


def test_a_checkpoint_of_a_step_that_was_done_again_stalled_that_one() -> None:
    events = [started(0), formed(1), steps(0, 2, 3, 4), started(100), restored(100, 0), formed(101), steps(0, 102, 103)]
    check(fold([*events, saved(103, 1, 0.5)]), starting=2, training=3, redoing=1.5, checkpoint_stall=0.5)


def test_steps_that_are_told_twice_or_by_a_clock_that_is_behind_take_no_time() -> None:
    events = [*PLAIN, steps(0, 6, 7), steps(4, 3, 10)]
    check(fold(events), starting=5, training=4.25, data_wait=0.75)


def test_waits_that_do_not_fit_their_steps_are_left_out() -> None:
    check(fold([started(0), formed(1), steps(0, 2, 3, waits=[0.5])]), starting=1, training=2)


seconds = st.floats(-10, 1000) | st.sampled_from([0.0, 1e-9, math.inf, -math.inf, math.nan, 1e300])
times = st.floats(T, T + 5000) | st.sampled_from([0.0, math.nan, math.inf, T, T + 10])
numbers = st.integers(0, 8)
workers = st.text("abc", max_size=3)


def events_of_any_kind() -> st.SearchStrategy[kinds.Event]:
    def timed(event: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.builds(lambda one, time: type(one)(**{**vars(one), "time": time}), event, times)

    parts = st.fixed_dictionaries(dict.fromkeys(("pause_s", "redone_s", "detecting_s", "waiting_s"), seconds))
    moments = st.lists(st.floats(-10, 5000) | st.sampled_from([math.nan, math.inf]), max_size=5)
    return st.one_of(
        timed(st.builds(lambda n: started(0, n), numbers)),
        timed(st.builds(lambda names, kwargs: formed(0, names, "loss", **kwargs), workers, parts)),
        timed(st.builds(lambda n, at, waits: steps(n, *at, waits=waits), numbers, moments, st.lists(seconds, max_size=5))),
        timed(st.builds(lambda n, s: evaluated(0, n, s), numbers, seconds)),
        timed(st.builds(lambda n, s: saved(0, n, s), numbers, seconds)),
        timed(st.builds(lambda n: kinds.CheckpointFailed(step=n, reason=""), numbers)),
        timed(st.builds(lambda n: restored(0, n), numbers)),
        timed(st.builds(lambda name: lost(0, name), workers)),
        timed(st.just(short(0)) | st.just(printed(0)) | st.just(ended(0, 1))),
    )


def moments_of(event: kinds.Event) -> list[float]:
    finished = event.finished if isinstance(event, kinds.StepsDone) else []
    return [at for at in (event.time, *finished) if at and math.isfinite(at)]


def wall_time(events: list[kinds.Event], now: float) -> float:
    """By the definition, session by session: from its RunStarted to the latest moment that it knows of."""
    starts = [i for i, event in enumerate(events) if isinstance(event, kinds.RunStarted)]
    total, before = 0.0, 0.0
    for first, stop in itertools.pairwise([*starts, len(events)]):
        session = events[first + 1 : stop]
        end = next((i for i, event in enumerate(session) if isinstance(event, kinds.RunEnded)), None)
        start = (moments_of(events[first]) or [before])[0]
        moments = [at for event in session[: end if end is None else end + 1] for at in moments_of(event)]
        before = max([start, *moments])
        total += max(before, now if stop == len(events) and end is None else before) - start
    return total


@settings(max_examples=500, deadline=None)
@given(events=st.lists(events_of_any_kind(), max_size=40), now=st.floats(0, 6000))
def test_the_sum_of_the_classes_is_the_wall_time_of_any_events(events: list[kinds.Event], now: float) -> None:
    ledger = fold(events).at(T + now)
    assert sum(ledger.seconds().values()) == pytest.approx(ledger.wall_s, abs=1e-6)
    assert ledger.wall_s == pytest.approx(wall_time(events, T + now), abs=1e-6)
    assert min(ledger.seconds().values()) >= 0
    assert 0 <= ledger.goodput <= 1


def test_a_million_steps_lose_no_time_to_rounding_and_the_books_stay_small() -> None:
    books = fold([started(0), formed(1)])
    for first in range(0, 1_000_000, 1000):
        books = reduce(books, steps(first, *(1 + 0.037 * (step + 1) for step in range(first, first + 1000))))
    assert sum(books.at().seconds().values()) == pytest.approx(37_001.0, abs=1e-6)
    assert len(repr(books)) < 2000
