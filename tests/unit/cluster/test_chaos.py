"""A schedule follows from its script or its seed, and a victim from the schedule and the members."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.cluster.chaos import KINDS, Fault, drawn, is_due, parse_kinds, parse_script, victim
from raytrain.errors import ConfigError
from raytrain.events.kinds import Member

MEMBERS = [Member(worker=f"w{serial}", rank=rank, node="n", pid=serial, logical=[]) for rank, serial in ((1, 4), (0, 2))]

SCRIPT = """
# a rehearsal
after 30 kill w1
step 100 stop   rank0   # hangs
after 60.5 drain 10.0.0.2
"""


def test_a_script_is_read_line_by_line() -> None:
    assert parse_script(SCRIPT, "faults.txt") == [
        Fault("kill", "w1", after_s=30.0),
        Fault("stop", "rank0", step=100),
        Fault("drain", "10.0.0.2", after_s=60.5),
    ]


@pytest.mark.parametrize(
    ("text", "where", "value"),
    [
        ("after 3 kill w1\nafter 5 burn w1", "f, line 2", "after 5 burn w1"),
        ("after -3 kill w1", "f, line 1", "after -3 kill w1"),
        ("step 1.5 kill w1", "f, line 1", "step 1.5 kill w1"),
        ("after 3 kill", "f, line 1", "after 3 kill"),
        ("after 3 kill 10.0.0.2", "f, line 1", "10.0.0.2"),
        ("# nothing", "f", "no faults"),
    ],
)
def test_a_line_that_is_not_understood_is_named(text: str, where: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_script(text, "f")
    assert (caught.value.where, caught.value.value) == (where, value)


def test_kinds_are_checked() -> None:
    assert parse_kinds("kill, stop", "--faults") == ["kill", "stop"]
    for text in ("", "kil", "kill,"):
        with pytest.raises(ConfigError):
            parse_kinds(text, "--faults")


@given(st.integers(0, 2**63), st.floats(0.5, 60), st.floats(0, 600), st.lists(st.sampled_from(KINDS), min_size=1))
def test_the_same_seed_gives_the_same_faults(seed: int, every_s: float, for_s: float, kinds: list[str]) -> None:
    faults = drawn(every_s, for_s, kinds, seed)
    assert faults == drawn(every_s, for_s, kinds, seed)
    times = [fault.after_s or 0.0 for fault in faults]
    assert times == sorted(times)
    assert all(0 < time <= for_s + 1e-6 for time in times)
    assert len(faults) == int(for_s / every_s + 1e-9)
    assert {fault.kind for fault in faults} <= set(kinds)


def test_seeds_differ_and_stay_as_they_are() -> None:
    assert drawn(15, 120, ["kill", "stop"], 1) != drawn(15, 120, ["kill", "stop"], 2)
    assert [fault.kind for fault in drawn(15, 75, ["kill", "stop"], 0)] == ["stop", "kill", "stop", "stop", "kill"]


def test_a_fault_is_due_by_time_or_by_step() -> None:
    by_time, by_step = Fault("kill", "w1", after_s=3.0), Fault("kill", "w1", step=7)
    assert [is_due(by_time, seconds, 1000) for seconds in (2.9, 3.0)] == [False, True]
    assert [is_due(by_step, 1000.0, step) for step in (6, 7, 9)] == [False, True, True]


def test_a_victim_is_named_by_worker_or_by_rank_or_drawn() -> None:
    def name(fault: Fault) -> str | None:
        found = victim(fault, MEMBERS)
        return found and found.worker

    assert [name(Fault("kill", target)) for target in ("w4", "rank0", "w9", "rank2")] == ["w4", "w2", None, None]
    assert [name(Fault("kill", draw=draw)) for draw in (0.0, 0.49, 0.5, 0.999)] == ["w2", "w2", "w4", "w4"]
    assert victim(Fault("kill"), []) is None
