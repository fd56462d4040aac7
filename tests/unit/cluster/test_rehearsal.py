"""Faults are carried out in time and written down; one without a victim is tried again, and then given up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from raytrain.cluster import processes
from raytrain.cluster.chaos import Fault
from raytrain.cluster.processes import Processes
from raytrain.cluster.record import Record, open_running
from raytrain.cluster.rehearsal import PATIENCE_S, Hands, Missed, Outcome, Rehearsal
from raytrain.errors import ConfigError, StorageError
from raytrain.events import kinds
from raytrain.events.log import EventLog, read
from raytrain.events.values import to_json
from raytrain.events.view import RunView, fold
from raytrain.rundir import RunDir
from tests.unit.cluster.test_processes import show
from tests.unit.events.test_view import started, steps


def formed(*pids: int, node: str = "127.0.0.1") -> kinds.GenerationFormed:
    members = [kinds.Member(worker=f"w{pid}", rank=rank, node=node, pid=pid, logical=[]) for rank, pid in enumerate(pids)]
    return kinds.GenerationFormed(generation=1, step=0, members=members, pause_s=0.0, cause="start")


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir.at(str(tmp_path), "run")
    EventLog(run_dir).append([started(), formed(20, 21)])
    return run_dir


class World:
    """A clock that sleeping moves on, and what happens at each second."""

    def __init__(self, run_dir: RunDir, happens: dict[int, kinds.Event]) -> None:
        self.log, self.happens, self.now, self.said = EventLog(run_dir), happens, 1000.0, list[str]()

    def sleep(self, seconds: float) -> None:
        before, self.now = self.now, self.now + seconds
        self.log.append(event for at, event in self.happens.items() if before < 1000 + at <= self.now)

    def rehearse(self, record: Record, faults: list[Fault], cause: Callable[[Fault, RunView], str]) -> Outcome:
        return Rehearsal(record, faults, cause, self.said.append, lambda: self.now, self.sleep).run()


def test_faults_come_in_time_and_are_in_the_events(run_dir: RunDir) -> None:
    world = World(run_dir, {5: steps(0, 10)})
    faults = [Fault("kill", "w20", after_s=2.0), Fault("stop", "rank1", step=10), Fault("kill", "w21", after_s=8.0)]
    outcome = world.rehearse(open_running(run_dir), faults, lambda fault, view: f"{fault.target}!")
    assert (outcome.fired, outcome.missed) == (3, 0)
    injected = [event for event in read(run_dir) if isinstance(event, kinds.FaultInjected)]
    assert [(event.fault, event.target) for event in injected] == [("kill", "w20!"), ("stop", "rank1!"), ("kill", "w21!")]
    assert [event.time - 1000 for event in injected] == pytest.approx([2, 5, 8], abs=0.21)
    assert world.said[0] == "   2.0 s  kill w20!"


def test_a_fault_without_a_victim_is_tried_again_and_then_given_up(run_dir: RunDir) -> None:
    tries: list[str] = []

    def cause(fault: Fault, view: RunView) -> str:
        tries.append(fault.target)
        if fault.target == "w9" or len(tries) < 5:
            raise Missed("no such worker")
        return fault.target

    world = World(run_dir, {})
    outcome = world.rehearse(
        open_running(run_dir), [Fault("kill", "w9", after_s=1.0), Fault("kill", "w20", after_s=1.0)], cause
    )
    assert (outcome.fired, outcome.missed) == (1, 1)
    assert tries.count("w20") < 5 < tries.count("w9")
    assert world.now - 1000 == pytest.approx(1 + PATIENCE_S, abs=0.5)
    assert world.said[-1].endswith("missed: after 1 kill w9: no such worker")


def test_the_schedule_begins_with_the_workers_and_ends_with_the_run(tmp_path: Path) -> None:
    run_dir = RunDir.at(str(tmp_path), "run")
    EventLog(run_dir).append([started()])
    world = World(run_dir, {20: formed(20), 30: kinds.RunEnded(outcome="completed", step=100, message="")})
    faults = [Fault("kill", after_s=5.0), Fault("kill", after_s=15.0)]
    outcome = world.rehearse(open_running(run_dir), faults, lambda fault, view: "w20")
    assert (outcome.fired, outcome.missed, outcome.view.state) == (1, 0, "completed")
    assert world.said == ["   5.0 s  kill w20"]


def test_a_line_that_is_being_written_is_read_when_it_is_whole(run_dir: RunDir) -> None:
    record = open_running(run_dir)
    path = Path(run_dir.child("events.jsonl"))
    line = json.dumps(to_json(steps(0, 10)))
    with path.open("a") as file:
        file.write(line[:20])
        file.flush()
        assert record.refresh().step == 0
        file.write(line[20:] + "\n\n[1]\n{\n")
    assert record.refresh().step == 10
    record.add(kinds.FaultInjected(time=1.0, fault="kill", target="w1"))
    assert path.read_text().endswith('"target": "w1"}\n')


def test_what_cannot_be_disturbed_is_refused(tmp_path: Path, run_dir: RunDir) -> None:
    with pytest.raises(StorageError, match=r"no events\.jsonl"):
        open_running(RunDir.at(str(tmp_path), "nope"))
    with pytest.raises(StorageError, match="not a local path"):
        open_running(RunDir(run_dir.filesystem, run_dir.path, is_local=False))
    EventLog(run_dir).append([kinds.RunEnded(outcome="completed", step=100, message="")])
    with pytest.raises(ConfigError, match="completed at step 100"):
        open_running(run_dir)


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    sent: list[tuple[str, int]] = []
    monkeypatch.setattr(processes, "kill", lambda pid: sent.append(("kill", pid)))
    monkeypatch.setattr(processes, "stop", lambda pid: sent.append(("stop", pid)))
    return sent


@pytest.fixture
def hands(tmp_path: Path) -> Hands:
    proc = tmp_path / "proc"
    proc.mkdir()
    show(proc, 10, ["/ray/raylet/raylet", "--node_id=abc", "--node_ip_address=127.0.0.1"])
    show(proc, 11, ["/ray/raylet/raylet", "--node_id=def", "--node_ip_address=127.0.0.2", "--head"])
    show(proc, 20, ["ray::RayTrainWorker"], parent=10)
    show(proc, 21, ["ray::RayTrainWorker"], parent=11)
    show(proc, 22, ["/usr/bin/postgres"])
    return Hands("cluster:1", 7.0, Processes(proc))


def test_workers_and_nodes_of_this_machine_are_signalled(hands: Hands, signals: list[tuple[str, int]]) -> None:
    view = fold([started(), formed(20, 21)])
    assert hands.cause(Fault("kill", "w20"), view) == "w20"
    assert hands.cause(Fault("stop", "rank1"), view) == "w21"
    assert hands.cause(Fault("kill", draw=0.9), view) == "w21"
    assert hands.cause(Fault("node", "rank0"), view) == "w20"
    assert hands.cause(Fault("node", "127.0.0.1"), view) == "127.0.0.1"
    assert signals == [("kill", 20), ("stop", 21), ("kill", 21), ("kill", 10), ("kill", 10)]


@pytest.mark.parametrize(
    ("fault", "members", "why"),
    [
        (Fault("kill", "w9"), formed(20), "no such worker"),
        (Fault("kill", "w22"), formed(22), "w22 is no running worker process"),
        (Fault("kill", "w20"), formed(20, node="192.0.2.77"), "w20 is no running worker process of this machine"),
        (Fault("kill"), formed(20, node="192.0.2.77"), "no such worker"),
        (Fault("node", "w21"), formed(21), "is the head"),
        (Fault("node", "127.0.0.2"), formed(21), "is the head"),
        (Fault("node", "127.0.0.3"), formed(21), "has 0 nodes"),
    ],
)
def test_nothing_else_is_signalled(
    fault: Fault, members: kinds.GenerationFormed, why: str, hands: Hands, signals: list[tuple[str, int]]
) -> None:
    with pytest.raises(Missed, match=why):
        hands.cause(fault, fold([started(), members]))
    assert signals == []


def test_a_worker_that_is_lost_is_not_chosen_again(hands: Hands, signals: list[tuple[str, int]]) -> None:
    lost = kinds.WorkerLost(worker="w20", node="127.0.0.1", pid=20, reason="gone")
    assert hands.cause(Fault("kill", draw=0.0), fold([started(), formed(20, 21), lost])) == "w21"


def test_a_drain_names_the_node_by_its_worker_or_its_address(hands: Hands, monkeypatch: pytest.MonkeyPatch) -> None:
    draining = pytest.importorskip("raytrain.cluster.draining")
    drained: list[tuple[str, str, float]] = []
    monkeypatch.setattr(
        draining, "drain", lambda cluster, node, deadline_s, why: drained.append((cluster, node, deadline_s))
    )
    monkeypatch.setattr(draining, "workers_nodes_at", lambda cluster, address: {"192.0.2.77": ["far"]}.get(address, []))
    view = fold([started(), formed(20)])
    assert hands.cause(Fault("drain", "w20"), view) == "w20"
    assert hands.cause(Fault("drain", "rank0"), fold([started(), formed(30, node="192.0.2.77")])) == "w30"
    assert hands.cause(Fault("drain", "192.0.2.77"), view) == "192.0.2.77"
    assert drained == [("cluster:1", node, 7.0) for node in ("abc", "far", "far")]
    with pytest.raises(Missed, match="0 nodes besides the head"):
        hands.cause(Fault("drain", "192.0.2.78"), view)
