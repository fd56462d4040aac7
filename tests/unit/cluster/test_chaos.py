"""The schedule follows from its script or seed; faults are injected in time, recorded, retried and given up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.cluster import chaos
from raytrain.cluster.chaos import KINDS, ChaosResult, ChaosRunner, Fault, NoVictimError, open_running
from raytrain.errors import ConfigError, ResourceError
from raytrain.events import kinds
from raytrain.events.kinds import to_json
from raytrain.events.log import EventLog, read
from raytrain.events.view import RunView
from raytrain.rundir import RunDir
from tests.unit.events.test_view import started, steps

SCRIPT = "\n# comment\nafter 30 kill w1\nstep 100 stop   rank0   # hangs\nafter 60.5 drain 10.0.0.2\n"


def formed(*pids: int, node: str = "127.0.0.1") -> kinds.GenerationFormed:
    members = [kinds.Member(worker=f"w{pid}", rank=rank, node=node, pid=pid, logical=[]) for rank, pid in enumerate(pids)]
    return kinds.GenerationFormed(generation=1, step=0, members=members, pause_s=0.0, cause="start")


def test_a_script_is_parsed_line_by_line() -> None:
    expected = [Fault("kill", "w1", 30.0), Fault("stop", "rank0", step=100), Fault("drain", "10.0.0.2", 60.5)]
    assert chaos.parse_script(SCRIPT, "faults.txt") == expected


@pytest.mark.parametrize(
    ("text", "where", "value"),
    [
        ("after 3 kill w1\nafter 5 burn w1", "f, line 2", "after 5 burn w1"),
        *(("after -3 kill w1", "f, line 1", "after -3 kill w1"), ("step 1.5 kill w1", "f, line 1", "step 1.5 kill w1")),
        *(("after 3 kill", "f, line 1", "after 3 kill"), ("after 3 kill 10.0.0.2", "f, line 1", "10.0.0.2")),
        ("# nothing", "f", "no faults"),
    ],
)
def test_an_invalid_line_of_a_script_is_named(text: str, where: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        chaos.parse_script(text, "f")
    assert (caught.value.where, caught.value.value) == (where, value)


@pytest.mark.parametrize("text", ["", "kil", "kill,"])
def test_unknown_kinds_of_faults_are_refused(text: str) -> None:
    assert chaos.parse_kinds("kill, stop", "--faults") == ["kill", "stop"]
    with pytest.raises(ConfigError):
        chaos.parse_kinds(text, "--faults")


@given(st.integers(0, 2**63), st.floats(0.5, 60), st.floats(0, 600), st.lists(st.sampled_from(KINDS), min_size=1))
def test_the_same_seed_gives_the_same_faults(seed: int, every_s: float, for_s: float, allowed: list[str]) -> None:
    faults = chaos.random_schedule(every_s, for_s, allowed, seed)
    assert faults == chaos.random_schedule(every_s, for_s, allowed, seed)
    assert [fault.after_s for fault in faults] == [every_s * (i + 1) for i in range(int(for_s / every_s + 1e-9))]
    assert {fault.kind for fault in faults} <= set(allowed)


def test_the_faults_of_a_seed_do_not_change_between_versions() -> None:
    found = [fault.kind for fault in chaos.random_schedule(15, 75, ["kill", "stop"], 0)]
    assert found == ["stop", "kill", "stop", "stop", "kill"]
    assert chaos.random_schedule(15, 75, ["kill"], 0) != chaos.random_schedule(15, 75, ["kill"], 1)


def test_a_victim_is_chosen_by_worker_rank_or_draw() -> None:
    members = formed(2, 4).members
    faults = [Fault("kill", target) for target in ("w4", "rank0", "w9", "rank2")]
    faults += [Fault("kill", draw=draw) for draw in (0.0, 0.49, 0.5, 0.999)]
    found = [chaos.victim(fault, reversed(members)) for fault in faults]
    assert [member and member.pid for member in found] == [4, 2, None, None, 2, 2, 4, 4]
    assert chaos.victim(Fault("kill"), []) is None


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir.at(str(tmp_path), "run")
    EventLog(run_dir).append([started(), formed(20, 21)])
    return run_dir


class World:
    """A clock that sleep advances, and events that happen at given seconds."""

    def __init__(self, run_dir: RunDir, happens: dict[int, kinds.Event]) -> None:
        self.run_dir, self.log, self.happens = run_dir, EventLog(run_dir), happens
        self.now, self.reported = 1000.0, list[str]()

    def sleep(self, seconds: float) -> None:
        before, self.now = self.now, self.now + seconds
        self.log.append(event for at, event in self.happens.items() if before < 1000 + at <= self.now)

    def run(self, faults: list[Fault], inject: Callable[[Fault, RunView], str]) -> ChaosResult:
        events, clock = open_running(self.run_dir), lambda: self.now
        return ChaosRunner(events, faults, inject, self.reported.append, clock, self.sleep).run()


def test_faults_are_injected_by_time_or_step_and_recorded(run_dir: RunDir) -> None:
    world = World(run_dir, {5: steps(0, 10)})
    faults = [Fault("kill", "w20", after_s=2.0), Fault("stop", "rank1", step=10), Fault("kill", "w21", after_s=8.0)]
    result = world.run(faults, lambda fault, view: f"{fault.target}!")
    assert (result.injected, result.missed) == (3, 0)
    recorded = [event for event in read(run_dir) if isinstance(event, kinds.FaultInjected)]
    assert [(event.fault, event.target) for event in recorded] == [("kill", "w20!"), ("stop", "rank1!"), ("kill", "w21!")]
    assert [event.time - 1000 for event in recorded] == pytest.approx([2, 5, 8], abs=0.21)
    assert world.reported[0] == "   2.0 s  kill w20!"


def test_a_fault_without_a_victim_is_retried_and_then_given_up(run_dir: RunDir) -> None:
    tries: list[str] = []

    def inject(fault: Fault, view: RunView) -> str:
        tries.append(fault.target)
        if fault.target == "w9" or len(tries) < 5:
            raise NoVictimError("no such worker")
        return fault.target

    world = World(run_dir, {})
    result = world.run([Fault("kill", "w9", after_s=1.0), Fault("kill", "w20", after_s=1.0)], inject)
    assert (result.injected, result.missed) == (1, 1)
    assert tries.count("w20") < 5 < tries.count("w9")
    assert world.now - 1000 == pytest.approx(1 + chaos.RETRY_S, abs=0.5)
    assert world.reported[-1].endswith("missed: after 1 kill w9: no such worker")


def test_the_schedule_starts_with_the_workers_and_ends_with_the_run(tmp_path: Path) -> None:
    run_dir = RunDir.at(str(tmp_path), "run")
    EventLog(run_dir).append([started()])
    with pytest.raises(ResourceError, match="no workers in 300 s"):
        World(run_dir, {}).run([Fault("kill")], lambda fault, view: "w20")
    world = World(run_dir, {20: formed(20), 30: kinds.RunEnded(outcome="completed", step=100, message="")})
    result = world.run([Fault("kill", after_s=5.0), Fault("kill", after_s=15.0)], lambda fault, view: "w20")
    assert (result.injected, result.missed, result.view.state) == (1, 0, "completed")
    assert world.reported == ["   5.0 s  kill w20"]


def test_an_incomplete_line_is_read_once_it_is_complete(run_dir: RunDir) -> None:
    events, path = open_running(run_dir), Path(run_dir.child("events.jsonl"))
    line = json.dumps(to_json(steps(0, 10)))
    with path.open("a") as file:
        file.write(line[:20])
        file.flush()
        assert events.refresh().step == 0
        file.write(line[20:] + "\n\n[1]\n{\n")
    assert events.refresh().step == 10
