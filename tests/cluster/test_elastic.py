"""P1, P2, P3 on real Ray: workers are killed and join, nobody else restarts, and the result stays the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from raytrain.events.kinds import GenerationFormed, StateRestored, StepsDone, WorkerLost, WorkerStarting
from tests.cluster.script import Script, run


class KillOnce(Script):
    """Kills the workers of ranks `victims` when all have trained for `at` steps; opens the gate once they are replaced."""

    def __init__(self, gate: Path, victims: Sequence[int], num_workers: int, at: int = 4) -> None:
        super().__init__()
        self.gate, self.victims, self.num_workers, self.at = gate, victims, num_workers, at
        self.killed: list[int] = []

    def act(self) -> None:
        generations = self.of(GenerationFormed)
        if not generations:
            return
        newest = generations[-1]
        if not self.killed and len(newest.members) == self.num_workers and self.finished >= newest.step + self.at:
            self.killed = [newest.members[rank].pid for rank in self.victims]
            for pid in self.killed:
                os.kill(pid, signal.SIGKILL)
        pids = {member.pid for member in newest.members}
        if self.killed and len(pids) == self.num_workers and not pids & set(self.killed) and self.finished > newest.step:
            self.gate.unlink(missing_ok=True)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("small_ray")
def test_r2_one_process_restarts_when_the_leader_of_two_workers_is_killed(tmp_path: Path, gate: Path) -> None:
    script = KillOnce(gate, [0], 2)
    _, events = run(tmp_path, script, gate, workers=(1, 2))
    assert len(script.killed) == 1
    started = [event.pid for event in events if isinstance(event, WorkerStarting)]
    generations = [event for event in events if isinstance(event, GenerationFormed)]
    last = {member.pid for member in generations[-1].members}
    assert len(started) == len(set(started)) == 3, "one process was started again"
    assert len(last & set(started[:2])) == 1, "the survivor is the process that it was"
    assert [event.pid for event in events if isinstance(event, WorkerLost)] == script.killed
    assert [event.step for event in events if isinstance(event, StateRestored)] == [0], "nothing went back to a checkpoint"
    steps = [e.first_step + i for e in events if isinstance(e, StepsDone) for i in range(len(e.losses))]
    assert steps == list(range(39)), "no committed step was done again"
    loss = next(g for g in generations if g.cause == "loss")
    assert loss.pause_s < 10


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("small_ray")
def test_when_all_workers_are_killed_the_run_goes_on_from_a_checkpoint(tmp_path: Path, gate: Path) -> None:
    script = KillOnce(gate, [0, 1], 2, at=5)
    _, events = run(tmp_path, script, gate, workers=(2, 2), logical_workers=4)
    restored = [event.step for event in events if isinstance(event, StateRestored)]
    assert restored[0] == 0
    assert restored[1:]
    assert all(step >= 3 for step in restored[1:])


class AddNode(Script):
    """Adds a node once the run trains, and opens the gate when its worker has joined."""

    def __init__(self, gate: Path, cluster: Cluster) -> None:
        super().__init__()
        self.gate, self.cluster, self.added = gate, cluster, False

    def act(self) -> None:
        if not self.added and self.finished >= 3:
            self.cluster.add_node(num_cpus=1)
            self.added = True
        if any(len(generation.members) == 2 for generation in self.of(GenerationFormed)):
            self.gate.unlink(missing_ok=True)


@pytest.fixture
def one_node(small_ray_is_down: None) -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def small_ray_is_down() -> None:
    ray.shutdown()


@pytest.mark.timeout(120)
def test_r2_a_worker_on_a_new_node_joins_and_no_step_is_lost(one_node: Cluster, tmp_path: Path, gate: Path) -> None:
    script = AddNode(gate, one_node)
    _, events = run(tmp_path, script, gate, workers=(1, 2), cpus_per_worker=1.0)
    generations = [event for event in events if isinstance(event, GenerationFormed)]
    assert [(len(g.members), g.cause) for g in generations] == [(1, "start"), (2, "join")]
    assert generations[1].members[0].pid == generations[0].members[0].pid
    assert not [event for event in events if isinstance(event, WorkerLost)]
