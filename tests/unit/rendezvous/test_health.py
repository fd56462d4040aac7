"""Who is evicted: the silent, and those that stay in one place for longer than that place may take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytrain.rendezvous.health import (
    AT_RENDEZVOUS,
    HANDING_OVER,
    READING,
    REDUCING,
    SAVING,
    STARTING,
    WAITING,
    WAITS_FOR_OTHERS,
    HealthMonitor,
    HealthTimeouts,
    Heartbeat,
)
from raytrain.rendezvous.state import Generation, JoinRequest

TIMEOUTS = HealthTimeouts(heartbeat_s=10.0, hang_s=25.0, slow_s=600.0, collective_s=20.0)
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
    name = {25.0: "run.hang_timeout_s", 600.0: "run.slow_timeout_s"}[limit_s]
    assert reason(beat(place, limit_s, is_first)) == ""
    text = f"stuck for {limit_s + 1:.0f} s: {place} at step 7 ({name}: {limit_s:g} s)"
    assert reason(beat(place, limit_s + 1, is_first)) == text


@pytest.mark.parametrize(
    ("place", "since_s", "is_evicted"),
    [
        (WAITING, 12.0, True),
        (HANDING_OVER, 12.0, True),
        (AT_RENDEZVOUS, 12.0, True),
        (REDUCING, 26.0, True),
        (REDUCING, 12.0, False),
        (LOSS, 12.0, False),
        (READING, 12.0, False),
    ],
)
def test_r6_an_overdue_member_is_evicted_unless_it_is_busy(place: str, since_s: float, is_evicted: bool) -> None:
    """It was told that its group is over, and that its collective is broken."""
    assert bool(reason(beat(place, since_s), is_overdue=True)) is is_evicted
    assert reason(beat(place, 1e6 if place in WAITS_FOR_OTHERS else since_s)) == "", "nobody waits for it"


def group_of(*activities: str, since_s: float = 30.0, usual_s: float = 0.0, is_first: bool = False, factor: int = 1) -> bool:
    """Whether a generation stalls whose members have just said that they do this."""
    members = tuple(JoinRequest(f"w{rank}", 7, ("h", 1)) for rank in range(len(activities)))
    generation, watching = Generation(4, members, "loss", timeout_factor=factor), monitor()
    for member, activity in zip(members, activities, strict=True):
        watching.record(Heartbeat(member.worker, 7, activity, since_s, is_first, generation, usual_s), 100.0)
    assert not watching.is_stalled(replace(generation, number=5), 100.0), "they speak of an earlier generation"
    assert not watching.is_stalled(generation, 106.0), "whoever is silent may be busy"
    return watching.is_stalled(generation, 100.0)


def test_r6_a_generation_stalls_when_nothing_explains_why_all_its_members_wait() -> None:
    assert group_of(WAITING, WAITING)
    assert group_of(WAITING, REDUCING)
    assert not group_of(WAITING, LOSS), "one is busy"
    assert not group_of(WAITING, READING)
    assert not group_of(WAITING, AT_RENDEZVOUS), "one is on its way"
    assert not group_of(WAITING, WAITING, since_s=20.0)
    assert not group_of(WAITING, REDUCING, since_s=25.0), "the pass itself may take that long"
    assert not group_of(WAITING, WAITING, is_first=True), "the backend may have to be set up"
    assert not group_of(HANDING_OVER, HANDING_OVER, since_s=600.0)
    assert not group_of(WAITING, WAITING, usual_s=15.0), "it usually takes that long"
    assert not group_of(WAITING, WAITING, factor=2)


def test_r6_a_member_that_is_alone_waits_for_nobody() -> None:
    alone, watching = Generation(4, (JoinRequest("w0", 7, ("h", 1)),), "loss"), monitor()
    watching.record(replace(beat(REDUCING, 26.0), generation=alone), 100.0)
    assert list(watching.unhealthy(100.0, generation=alone)) == ["w0"]
    assert not watching.is_stalled(alone, 100.0)
    assert watching.unhealthy(100.0, generation=replace(alone, number=5)) == {}, "it has not said yet that it is alone"


def test_r6_a_silent_worker_whose_process_answers_has_the_timeout_of_its_activity() -> None:
    """A call of the task holds the GIL: the worker cannot send heartbeats."""
    watching, store = monitor(), ("h", 5)
    for worker, activity in (("w0", LOSS), ("w1", WAITING)):
        watching.record(replace(beat(activity, 2.0, worker=worker), store=store), 100.0)
    assert watching.silent(105.0) == {}
    assert watching.silent(106.0) == {"w0": store, "w1": store}
    for now in range(106, 126):
        watching.record_answer("w0", now)
        watching.record_answer("w1", now)
        assert watching.unhealthy(now) == {}
    text = "stuck for 26 s: in loss at step 7 (run.hang_timeout_s: 25 s)"
    assert watching.unhealthy(126.0) == {"w0": text, "w1": text.replace(LOSS, WAITING)}
    watching.record(replace(beat(since_s=1.0), store=store), 127.0)
    assert "w0" not in watching.unhealthy(127.0)
    watching.record(replace(beat(HANDING_OVER), store=store), 200.0)  # packing a large state holds the GIL
    watching.record_answer("w0", 240.0)
    assert "w0" not in watching.unhealthy(240.0)


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
