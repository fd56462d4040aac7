"""Who is given up: the silent, and those that stay in one place for longer than that place may take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.rendezvous.generation import Entrant, Generation
from raytrain.rendezvous.vitals import AT_DOOR, PATIENT, READING, SAVING, SLOW, STARTING, WAITING, Beat, Limits, Vitals

LIMITS = Limits(heartbeat_s=10.0, hang_s=25.0, slow_s=600.0)
LOSS = "in loss"


def vitals() -> Vitals:
    return Vitals(LIMITS, look_every_s=1000.0)


def beat(place: str = LOSS, since_s: float = 0.0, is_first: bool = False, worker: str = "w0") -> Beat:
    return Beat(worker, 7, place, since_s, is_first)


def verdict(a_beat: Beat, is_late: bool = False) -> str:
    """Of a worker that has just said this."""
    watching = vitals()
    watching.note(a_beat, 100.0)
    return watching.verdicts(100.0, frozenset({"w0"} if is_late else ())).get("w0", "")


def test_r6_silence_is_given_up_after_its_limit_and_it_is_said_where_it_began() -> None:
    watching = vitals()
    watching.note(beat(), 100.0)
    assert watching.verdicts(110.0) == {}
    assert watching.verdicts(110.5) == {"w0": "no heartbeat for 10 s; it was last in loss at step 7"}


def test_a_worker_that_speaks_again_is_not_silent() -> None:
    watching = vitals()
    watching.note(beat(), 100.0)
    watching.note(beat(), 109.0)
    assert watching.verdicts(118.0) == {}


@pytest.mark.parametrize(
    ("place", "is_first", "limit_s"),
    [
        (LOSS, False, LIMITS.hang_s),
        (LOSS, True, LIMITS.slow_s),
        (READING, False, LIMITS.slow_s),
        (SAVING, False, LIMITS.slow_s),
        (STARTING, True, LIMITS.slow_s),
    ],
)
def test_r6_a_worker_that_stays_in_one_place_is_given_up_after_the_limit_of_that_place(
    place: str, is_first: bool, limit_s: float
) -> None:
    assert verdict(beat(place, limit_s, is_first)) == ""
    assert verdict(beat(place, limit_s + 1, is_first)) == f"stuck for {limit_s + 1:.0f} s: {place} at step 7"


@pytest.mark.parametrize("place", sorted(PATIENT))
def test_who_waits_for_others_has_no_limit_of_its_own(place: str) -> None:
    assert verdict(beat(place, 1e6)) == ""


@pytest.mark.parametrize(
    ("place", "is_first", "is_given_up"),
    [
        (LOSS, False, True),
        (WAITING, False, True),
        (AT_DOOR, False, True),
        (READING, False, False),
        (SAVING, False, False),
        (LOSS, True, False),
    ],
)
def test_r6_a_member_that_others_wait_for_is_given_up_unless_it_may_be_slow(
    place: str, is_first: bool, is_given_up: bool
) -> None:
    assert bool(verdict(beat(place, 12.0, is_first), is_late=True)) is is_given_up


def test_a_worker_that_starts_may_be_silent_for_as_long_as_a_start_may_take() -> None:
    watching = vitals()
    watching.expect("w0", 100.0, is_starting=True)
    assert watching.verdicts(700.0) == {}
    assert list(watching.verdicts(701.0)) == ["w0"]


def test_r6_a_member_of_whom_a_rendezvous_that_was_started_again_never_hears_is_given_up() -> None:
    watching = vitals()
    watching.note(beat(), 100.0)
    watching.expect("w0", 100.0, is_starting=False)
    watching.expect("w1", 100.0, is_starting=False)
    watching.note(beat(), 105.0)
    assert list(watching.verdicts(111.0)) == ["w1"]


def test_what_is_known_is_not_forgotten_for_what_is_expected() -> None:
    watching = vitals()
    watching.note(beat(since_s=30.0), 100.0)
    watching.expect("w0", 100.0, is_starting=True)
    assert list(watching.verdicts(100.0)) == ["w0"]


def test_a_worker_that_is_gone_is_not_missed() -> None:
    watching = vitals()
    watching.note(beat(), 100.0)
    watching.forget("w0")
    watching.forget("w1")
    assert watching.verdicts(1000.0) == {}


def test_r6_when_the_one_who_listens_stood_still_nobody_was_silent() -> None:
    """A machine that sleeps, or a process that is stopped, must not give all workers up when it wakes."""
    watching = Vitals(LIMITS, look_every_s=0.5)
    watching.note(beat(), 100.0)
    assert watching.verdicts(100.5) == {}
    assert watching.verdicts(160.0) == {}
    for now in (161.0, 162.0, 163.0, 164.0, 165.0, 166.0, 167.0, 168.0, 169.0):
        assert watching.verdicts(now) == {}
    assert list(watching.verdicts(170.5)) == ["w0"], "but silence afterwards counts"


@given(
    st.sampled_from(sorted(SLOW | PATIENT | {LOSS})),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
    st.booleans(),
    st.booleans(),
)
def test_nobody_within_all_limits_is_given_up_and_nobody_silent_is_kept(
    place: str, since_s: float, silent_s: float, is_first: bool, is_late: bool
) -> None:
    watching = vitals()
    watching.note(beat(place, since_s, is_first), 0.0)
    found = watching.verdicts(silent_s, frozenset({"w0"} if is_late else ()))
    if silent_s > LIMITS.heartbeat_s:
        assert found
    elif since_s <= LIMITS.hang_s and not is_late:
        assert not found


def test_in_short_a_heartbeat_names_its_generation_without_the_members() -> None:
    generation = Generation(4, (Entrant("w0", 7, ("h", 1)),), "loss")
    short = Beat("w0", 7, LOSS, 1.0, False, generation).in_short()
    assert short.generation == Generation(4, (), "loss")
    assert Beat("w0", 7, LOSS, 1.0, False).in_short().generation is None
