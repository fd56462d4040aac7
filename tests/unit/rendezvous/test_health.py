"""Who is evicted: the silent, and those that stay in one place for longer than that place may take."""

from __future__ import annotations

import pytest

from raytrain.rendezvous.health import (
    AT_RENDEZVOUS,
    READING,
    SAVING,
    STARTING,
    WAITING,
    WAITS_FOR_OTHERS,
    HealthMonitor,
    HealthTimeouts,
    Heartbeat,
)
from raytrain.rendezvous.state import Generation, JoinRequest

TIMEOUTS = HealthTimeouts(heartbeat_s=10.0, hang_s=25.0, slow_s=600.0)
LOSS = "in loss"


def monitor() -> HealthMonitor:
    return HealthMonitor(TIMEOUTS, check_every_s=1000.0)


def beat(activity: str = LOSS, since_s: float = 0.0, is_first: bool = False, worker: str = "w0") -> Heartbeat:
    return Heartbeat(worker, 7, activity, since_s, is_first)


def reason(a_beat: Heartbeat, is_overdue: bool = False) -> str:
    """Of a worker that has just said this."""
    watching = monitor()
    watching.record(a_beat, 100.0)
    return watching.unhealthy(100.0, frozenset({"w0"} if is_overdue else ())).get("w0", "")


def test_r6_a_silent_worker_is_evicted_and_its_last_activity_named() -> None:
    watching = monitor()
    watching.record(beat(), 90.0)
    watching.record(beat(), 100.0)
    assert watching.unhealthy(110.0) == {}
    assert watching.unhealthy(110.5) == {"w0": "no heartbeat for 10 s; it was last in loss at step 7"}


@pytest.mark.parametrize(
    ("place", "is_first", "limit_s"),
    [
        (LOSS, False, TIMEOUTS.hang_s),
        (LOSS, True, TIMEOUTS.slow_s),
        (READING, False, TIMEOUTS.slow_s),
        (SAVING, False, TIMEOUTS.slow_s),
        (STARTING, True, TIMEOUTS.slow_s),
    ],
)
def test_r6_a_worker_is_evicted_after_the_timeout_of_its_activity(place: str, is_first: bool, limit_s: float) -> None:
    assert reason(beat(place, limit_s, is_first)) == ""
    assert reason(beat(place, limit_s + 1, is_first)) == f"stuck for {limit_s + 1:.0f} s: {place} at step 7"


@pytest.mark.parametrize(
    ("place", "is_first", "is_evicted"),
    [
        (LOSS, False, True),
        (WAITING, False, True),
        (AT_RENDEZVOUS, False, True),
        (READING, False, False),
        (SAVING, False, False),
        (LOSS, True, False),
    ],
)
def test_r6_an_overdue_member_is_evicted_unless_it_may_be_slow(place: str, is_first: bool, is_evicted: bool) -> None:
    assert bool(reason(beat(place, 12.0, is_first), is_overdue=True)) is is_evicted
    assert reason(beat(place, 1e6 if place in WAITS_FOR_OTHERS else 12.0, is_first)) == "", "nobody waits for it"


def test_a_starting_worker_may_be_silent_for_the_slow_timeout() -> None:
    watching = monitor()
    watching.expect("w0", 100.0, is_starting=True)
    assert watching.unhealthy(700.0) == {}
    assert list(watching.unhealthy(701.0)) == ["w0"]


def test_r6_a_restarted_rendezvous_evicts_members_that_stay_silent() -> None:
    watching = monitor()
    watching.record(beat(), 100.0)
    watching.expect("w0", 100.0, is_starting=False)
    watching.expect("w1", 100.0, is_starting=False)
    watching.record(beat(), 105.0)
    watching.record(beat(since_s=30.0, worker="w2"), 105.0)
    watching.expect("w2", 106.0, is_starting=False)  # which keeps its latest heartbeat
    assert list(watching.unhealthy(111.0)) == ["w1", "w2"]


def test_a_forgotten_worker_is_not_evicted() -> None:
    watching = monitor()
    watching.record(beat(), 100.0)
    watching.forget("w0")
    watching.forget("w1")
    assert watching.unhealthy(1000.0) == {}


def test_r6_nobody_is_evicted_for_silence_while_the_monitor_stood_still() -> None:
    """A machine that sleeps, or a process that is stopped, must not evict all workers when it wakes."""
    watching = HealthMonitor(TIMEOUTS, check_every_s=0.5)
    watching.record(beat(), 100.0)
    assert watching.unhealthy(100.5) == {}
    assert watching.unhealthy(160.0) == {}
    for now in range(161, 170):
        assert watching.unhealthy(now) == {}
    assert list(watching.unhealthy(170.5)) == ["w0"], "but silence afterwards counts"


def test_a_heartbeat_without_members_names_its_generation() -> None:
    generation = Generation(4, (JoinRequest("w0", 7, ("h", 1)),), "loss")
    short = Heartbeat("w0", 7, LOSS, 1.0, False, generation).without_members()
    assert short.generation == Generation(4, (), "loss")
    assert Heartbeat("w0", 7, LOSS, 1.0, False).without_members().generation is None
