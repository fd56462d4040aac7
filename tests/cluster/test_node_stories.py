"""P1 to P4 on real Ray: newcomers that come together, a node whose workers come and go, and `raytrain chaos`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.cluster_utils import Cluster
from torch import nn

import raytrain
from raytrain.events.curve import curve
from raytrain.events.kinds import FaultInjected, GenerationFormed, StepsDone, WorkerLeft, WorkerLost
from raytrain.events.log import read
from raytrain.events.sweep import SweepView
from raytrain.launch import elasticity
from raytrain.rendezvous import flapping
from raytrain.rendezvous.actor import RendezvousActor
from raytrain.rundir import RunDir
from tests.cluster.nodes import Nodes, head_alone, nodes_of, play, restored
from tests.cluster.script import Story, seen, trained
from tests.laws.compare import assert_same, by_hand, settings
from tests.support.tasks import Gated

pytestmark = pytest.mark.timeout(150)
FIRST, CALM, FLAPPING = ADDRESSES = [f"127.0.77.{number}" for number in (1, 2, 3)]
WAIT_S = 2.0


class RendezvousActorInAHurry(RendezvousActor):
    """Newcomers of a flapping node wait for less long, so that the test is shorter."""

    def __init__(self, *args: Any) -> None:
        flapping.FIRST_WAIT_S = WAIT_S
        super().__init__(*args)


class Noted(Gated):
    """The second and the third process wait for each other before they come to the door; each notes when it is there.

    Steps are even slower while the gate is there.
    """

    notes: str = ""

    def model(self) -> nn.Module:
        begun, until = Path(self.notes, "begun"), time.monotonic() + 30
        begun.mkdir(exist_ok=True)
        (begun / str(os.getpid())).touch()
        while len(list(begun.iterdir())) == 2 and time.monotonic() < until:
            time.sleep(0.02)
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        note = Path(self.notes, str(os.getpid()))
        if not note.exists():  # the first pass of all comes just before the door
            note.write_text(str(time.time()))
        elif model.training and Path(self.gate).exists():
            time.sleep(0.1)
        return super().loss(model, batch)


class Play:
    """What is done to the run."""

    def __init__(self, nodes: Nodes, run_dir: Path) -> None:
        self._nodes, self._run_dir = nodes, run_dir
        self.struck: list[str] = []
        """Workers of the flapping node that were killed."""
        self.chaos: list[subprocess.Popen[str]] = []

    def add_two(self, story: Story) -> bool:
        if story.generation:
            for address in (CALM, FLAPPING):
                self._nodes.add(node_ip_address=address, wait=False)
        return story.generation is not None

    def strike(self, story: Story) -> bool:
        """Kills the worker of the flapping node as soon as it has been let in."""
        if not self.are_three(story):
            return False
        member = next(member for member in story.members if member.node == FLAPPING)
        self.struck.append(member.worker)
        os.kill(member.pid, signal.SIGKILL)
        return True

    def are_three(self, story: Story) -> bool:
        return len(story.members) == 3 and {member.worker for member in story.members}.isdisjoint(self.struck)

    def is_gone(self, _: Story) -> bool:
        """Whether the flapping node is gone. Its workers live on until its parent, this process, has asked for its end."""
        raylet = self._nodes.all[ADDRESSES.index(FLAPPING)].all_processes["raylet"][0].process
        return raylet.poll() is not None

    def begin_chaos(self, _: Story) -> bool:
        script = self._run_dir.with_name("faults.txt")
        script.write_text(f"after 0 node {FLAPPING}\nafter 0.5 drain {CALM}\n")
        raytrain = Path(sys.executable).with_name("raytrain")
        cluster = self._nodes.cluster.address
        command = [raytrain, "chaos", self._run_dir, "--script", script, "--address", cluster]
        self.chaos.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return True


@pytest.fixture(scope="module")
def head() -> Iterator[Cluster]:
    with head_alone() as cluster:
        yield cluster


@pytest.fixture
def hands(head: Cluster, tmp_path: Path) -> Iterator[Play]:
    """Who plays with a cluster that has one worker node."""
    (tmp_path / "notes").mkdir()
    with nodes_of(head) as nodes:
        nodes.add(node_ip_address=FIRST)
        one = Play(nodes, tmp_path / "run")
        yield one
        for process in one.chaos:
            process.kill()
            process.wait()


def test_two_newcomers_are_one_change_a_flapping_node_waits_longer_each_time_and_chaos_takes_nodes(
    hands: Play, tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elasticity, "RendezvousActor", RendezvousActorInAHurry)
    come_and_go = [hands.add_two, hands.strike, hands.strike, hands.strike, hands.are_three]
    rehearsal = [hands.begin_chaos, hands.is_gone, seen(FaultInjected, 2), seen(WorkerLost, 4), seen(WorkerLeft)]
    task = Noted(gate=str(gate), notes=str(tmp_path / "notes"))
    more = {"workers": (1, 3), "logical_workers": 4, "checkpoint_every": 1000, "epochs": 18}
    events, generations, story = play(tmp_path, gate, [*come_and_go, *rehearsal, trained(1, steps=1)], task=task, **more)
    said, _ = hands.chaos[0].communicate(timeout=30)

    assert restored(events) == [0], "nothing went back to a checkpoint"
    assert (len(generations[0].members), len(generations[1].members), generations[1].cause) == (1, 3, "join")
    (first,) = generations[0].members
    assert all(first.pid in {member.pid for member in generation.members} for generation in generations)
    _check_waits(tmp_path / "notes", events, generations, hands.struck)

    faults = [("node", FLAPPING), ("drain", CALM)]
    assert (hands.chaos[0].returncode, "2 of 2 faults happened" in said) == (0, True), said
    assert [(event.fault, event.target) for event in events if isinstance(event, FaultInjected)] == faults
    assert [(event.fault, event.target) for event in story.of(FaultInjected)] == faults, "who watched the run saw them"
    assert [event.node for event in story.of(WorkerLeft)] == [CALM]
    assert [member.node for member in generations[-1].members] == [FIRST]


def _check_waits(notes: Path, events: list[Any], generations: list[GenerationFormed], struck: list[str]) -> None:
    """Of the newcomers of the flapping node, the third and the fourth were let in after longer and longer waits."""
    let_in = {member: formed.time for formed in reversed(generations) for member in _of(formed, FLAPPING)}
    (one, *successors), times = zip(*sorted(let_in.items(), key=lambda item: item[1]), strict=True)
    assert [worker for worker, _ in (one, *successors)][:3] == struck
    waits = [(float((notes / str(pid)).read_text()), end) for (_, pid), end in zip(successors, times[1:], strict=True)]
    _, second, third = (end - start for start, end in waits)
    assert (second > WAIT_S, third > 2 * WAIT_S) == (True, True)
    finished = [at for event in events if isinstance(event, StepsDone) for at in event.finished]
    for start, end in waits[1:]:
        assert sum(start < at < end for at in finished) >= 2, "the others trained while it waited"


def _of(generation: GenerationFormed, node: str) -> list[tuple[str, int]]:
    return [(member.worker, member.pid) for member in generation.members if member.node == node]


class KillsANode:
    """Watches a sweep of one trial: kills the node of its reserved place once it has two workers, and waits for the next."""

    def __init__(self, nodes: Nodes, gate: Path, directory: Path) -> None:
        self.nodes, self.gate, self.directory = nodes, gate, directory
        self.killed_at = 0

    def show(self, view: SweepView, now: float) -> None:
        events = list(read(RunDir.at(str(self.directory), "trial-0000")))
        formed = [event for event in events if isinstance(event, GenerationFormed)]
        if not self.killed_at and formed and len(formed[-1].members) == 2 and view.trials[0].step > formed[-1].step + 2:
            first = next(member for member in formed[-1].members if member.worker == "w0")
            self.nodes.kill(self.nodes.of_pid(first.pid))
            self.nodes.add()
            self.killed_at = len(formed)
        if self.killed_at and any(len(event.members) == 2 for event in formed[self.killed_at :]):
            self.gate.unlink(missing_ok=True)

    def say(self, text: str, now: float) -> None:
        """Not looked at."""


def test_r15_a_trial_whose_reserved_place_is_lost_with_its_node_goes_on_and_gets_another(
    head: Cluster, tmp_path: Path, gate: Path
) -> None:
    config = settings(name="sweep", storage=str(tmp_path), workers=(1, 2), cpus_per_worker=1.0, best="min:valid/mae")
    space, fixed = {"lr": tune.grid_search([0.05])}, {"gate": str(gate)}
    with nodes_of(head) as nodes:
        nodes.add()
        nodes.add()
        watcher = KillsANode(nodes, gate, tmp_path / "sweep")
        result = raytrain.Sweep(Gated, space, config=config, fixed=fixed, trials=1).fit(watcher)
    assert [trial.state for trial in result.view.trials] == ["completed"]
    run_dir = RunDir.at(str(tmp_path / "sweep"), "trial-0000")
    events = list(read(run_dir))
    assert restored(events) == [0], "the other one went on"
    assert [event.worker for event in events if isinstance(event, WorkerLost)] == ["w0"]
    assert_same(run_dir, curve(read(run_dir)), by_hand("dropout", settings()))
