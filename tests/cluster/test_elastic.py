"""P1 to P6, R2, R6 and R15 on real Ray: workers and nodes come, die, hang and leave in a few long runs.

Nobody else restarts, no committed step is done again, and the result is the one of a single process, in bitwise mode to the
last byte.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ray import tune

import raytrain
from raytrain.checkpoint.store import CheckpointStore
from raytrain.errors import PoisonRowsError, ResourceError
from raytrain.events.curve import curve
from raytrain.events.kinds import (
    CheckpointSaved,
    EvaluationDone,
    FaultInjected,
    GenerationFormed,
    Member,
    StateRestored,
    StepsDone,
    WaitingForWorkers,
    WorkerDrained,
    WorkerLost,
    WorkerStarting,
)
from raytrain.events.log import read
from raytrain.events.sweep import SweepView
from raytrain.rendezvous.actor import RendezvousActor
from raytrain.rundir import RunDir
from tests.cluster.nodes import Nodes
from tests.cluster.script import Part, Stage, Story, actor_pid, run, seen, signal_rank, then, trained
from tests.laws.compare import assert_same, by_hand, settings
from tests.support.local import LocalRun, Plot
from tests.support.tasks import Gated

pytestmark = pytest.mark.timeout(240)
SLACK_S = 2.0  # of a machine that does other things too
FIRST, CALM, FLAPPING = ADDRESSES = [f"127.0.77.{number}" for number in (1, 2, 3)]
WAIT_S = 2.0
LONG = {"logical_workers": 4, "cpus_per_worker": 1.0, "epochs": 24}


class RendezvousActorInAHurry(RendezvousActor):
    """Newcomers of a flapping node wait for less long, so that the test is shorter."""

    def __init__(self, *args: Any) -> None:
        import raytrain.rendezvous.state as backoff

        backoff.FIRST_BACKOFF_S = WAIT_S
        super().__init__(*args)


def of(kind: type, events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def restored(events: list[Any]) -> list[int]:
    return [event.step for event in of(StateRestored, events)]


def steps_of(events: list[Any]) -> list[int]:
    return [event.first_step + i for event in of(StepsDone, events) for i in range(len(event.losses))]


def pids(formed: GenerationFormed) -> set[int]:
    return {member.pid for member in formed.members}


class Comings:
    """What is done to the long run of the first test."""

    def __init__(self, nodes: Nodes, stage: Stage) -> None:
        self.nodes, self.stage = nodes, stage
        self.struck: list[Member] = []

    def add_two(self, story: Story) -> bool:
        if story.generation:
            (self.stage.path / "meet").mkdir()
            for address in (CALM, FLAPPING):
                self.nodes.add(node_ip_address=address, wait=False)
        return story.generation is not None

    def are_three(self, story: Story) -> bool:
        return len(story.members) == 3 and {member.worker for member in story.members}.isdisjoint(
            {member.worker for member in self.struck}
        )

    def strike(self, story: Story) -> bool:
        """Kills the worker of the flapping node as soon as it has been let in."""
        if not self.are_three(story):
            return False
        self.struck.append(next(member for member in story.members if member.node == FLAPPING))
        os.kill(self.struck[-1].pid, signal.SIGKILL)
        return True

    def drain_two(self, _: Story) -> bool:
        for address in (CALM, FLAPPING):
            self.nodes.drain(ADDRESSES.index(address), deadline_s=20)
        return True

    def drain_at(self, place: str, num_left: int, newcomers: int) -> list[Part]:
        """Drains the node of a process that is in the middle of something, and adds others once its worker has left."""

        def drain(_: Story) -> bool:
            pid = self.stage.pid_at(place)
            if pid:
                self.nodes.drain(self.nodes.of_pid(pid))
            return bool(pid)

        def add(_: Story) -> None:
            for _ in range(newcomers):
                self.nodes.add(wait=False)

        return [drain, seen(WorkerDrained, num_left), then(add)]


def test_p1_p3_r2_workers_come_die_flap_and_drain_and_no_byte_differs_from_one(
    nodes: Nodes, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytrain.launch.elasticity.RendezvousActor", RendezvousActorInAHurry)
    hand = Comings(nodes, stage)
    nodes.add(node_ip_address=FIRST)
    leader_dies = signal_rank(0)
    parts = [
        *(hand.add_two, hand.strike, hand.strike, hand.are_three, trained(3)),
        *(leader_dies, seen(WorkerLost, 3), trained(3), hand.drain_two, seen(WorkerDrained, 2), trained(1)),
        *(stage.ask("first pass", 3), stage.ask("evaluation", 2), *hand.drain_at("evaluation", num_left=3, newcomers=2)),
        *(*hand.drain_at("first pass", num_left=4, newcomers=0), trained(1)),
        *(stage.ask("save", 2), *hand.drain_at("save", num_left=5, newcomers=1), trained(1)),
    ]
    story, more = Story(stage.gate, *parts), {"exactness": "bitwise", "checkpoint_every": 9, "eval_every": 5, **LONG}
    run_dir, events = run(tmp_path, story, stage.gate, stage.task, workers=(1, 3), **more)
    generations = of(GenerationFormed, events)

    first, second, *_ = generations
    assert (len(first.members), len(second.members), second.cause) == (1, 3, "join"), "two newcomers are one change"
    assert steps_of(events) == list(range(24 * 13)), "no committed step was lost or done again"
    assert len(of(WorkerLost, events)) == 3, "nobody died but those that were killed"
    check_flapping_node_waits(stage, events, hand.struck)
    check_leader_dies(story, generations, story.time_of(leader_dies))
    check_drains(story, generations, story.time_of(hand.drain_two))

    begun, *again = restored(events)
    assert (begun, len(again)) == (0, 2), "a checkpoint is read only where nobody was left"
    saved = [event.step for event in of(CheckpointSaved, events)]
    assert set(again) <= set(saved), "the last one to leave saved its last step"
    config = settings(storage=str(tmp_path / "plain"), workers=(1, 4), **more)
    one = LocalRun(Gated(), config, tmp_path / "plain", Plot(1))
    one.run()
    assert outcome(run_dir) == outcome(one.run_dir)


def check_flapping_node_waits(stage: Stage, events: list[Any], struck: list[Member]) -> None:
    """After its second short life, and not after the first; the others train meanwhile."""
    formed = reversed(of(GenerationFormed, events))
    let_in = {member.pid: one.time for one in formed for member in one.members if member.node == FLAPPING}
    _, second, third = sorted(let_in, key=lambda pid: let_in[pid])
    assert [member.pid for member in struck][1] == second
    start, end = stage.ready_at(third), let_in[third]
    assert end - start > WAIT_S
    assert sum(start < at < end for event in of(StepsDone, events) for at in event.finished) >= 2


def check_leader_dies(story: Story, generations: list[GenerationFormed], at: float) -> None:
    before = [formed for formed in generations if formed.time < at][-1]
    loss = next(formed for formed in generations if formed.time > at)
    assert (loss.cause, len(loss.members)) == ("loss", 2)
    assert pids(loss) < pids(before), "the survivors are the processes that they were"
    assert before.members[0].pid not in pids(loss)
    assert loss.pause_s < 10


def check_drains(story: Story, generations: list[GenerationFormed], notice: float) -> None:
    departure = next(formed for formed in generations if formed.cause == "drain" and formed.step)
    assert len(departure.members) == 1, "two drains close together are one change"
    assert departure.time - notice < 4 * 0.15 + 1 + SLACK_S, "under a step and 1 s"
    assert departure.pause_s < 2
    assert [event.node for event in story.of(WorkerDrained)[:2]] in ([CALM, FLAPPING], [FLAPPING, CALM])


def outcome(run_dir: RunDir) -> tuple[Any, ...]:
    """SHA-256 of each file of the newest checkpoint, the losses, and the evaluations."""
    newest, events = CheckpointStore(run_dir).newest_verified(), list(read(run_dir))
    assert newest is not None
    digests = {name: entry.sha256 for name, entry in newest.manifest.files.items()}
    evaluations = {event.step: event.metrics for event in of(EvaluationDone, events)}
    return digests, [record.loss for record in curve(events).values()], evaluations


def test_p1_p5_below_the_minimum_workers_wait_and_save_when_that_takes_too_long(
    nodes: Nodes, stage: Stage, tmp_path: Path
) -> None:
    """The first node dies by `raytrain chaos`, with two workers; then all die at once."""
    nodes.add(num_cpus=2, node_ip_address=FIRST)
    nodes.add()
    chaos: list[subprocess.Popen[str]] = []

    def begin_chaos(_: Story) -> None:
        (tmp_path / "faults").write_text(f"after 0 node {FIRST}\n")
        command = [Path(sys.executable).with_name("raytrain"), "chaos", tmp_path / "run", "--script", tmp_path / "faults"]
        chaos.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

    def is_gone(_: Story) -> bool:
        """Whether the node is gone. Its workers live on until its parent, this process, has asked for its end."""
        return nodes.all[0].all_processes["raylet"][0].process.poll() is not None

    def replace_all(_: Story) -> None:
        for node in list(nodes.cluster.worker_nodes):
            nodes.cluster.remove_node(node, allow_graceful=False)
        for _ in range(2):
            nodes.add()

    add, replace = then(lambda _: nodes.add(wait=False)), then(replace_all)
    kill_one = then(lambda story: nodes.kill(nodes.of_rank(story, 1)))
    parts = [
        *(trained(3), then(begin_chaos), is_gone, seen(FaultInjected), seen(WorkerLost, 2), seen(WaitingForWorkers)),
        *(add, trained(2), replace, seen(WorkerLost, 4), trained(2), kill_one),
    ]
    story = Story(stage.gate, *parts)
    more = {"workers": (2, 3), "wait_timeout_s": 20.0, **LONG}
    _, events = run(tmp_path, story, stage.gate, stage.task, raises=ResourceError, **more)
    said, _ = chaos[0].communicate(timeout=30)
    assert (chaos[0].returncode, "1 of 1 faults happened" in said) == (0, True), said
    assert [(event.fault, event.target) for event in of(FaultInjected, events)] == [("node", FIRST)]

    waiting = story.of(WaitingForWorkers)[0]
    assert (waiting.have, waiting.need) == (1, 2)
    first, second = restored(events)
    assert first == 0, "the survivor kept its state while it waited"
    assert second >= 3, "when all had died, the newest checkpoint was where the run went on"
    (fault,) = of(FaultInjected, events)
    formed = [event for event in of(GenerationFormed, events) if event.time < story.time_of(replace)]
    three, two = [event for event in formed if event.time < fault.time][-1], formed[-1]
    assert len(pids(three) & pids(two)) == 1, "the survivor is the process that it was"
    asked = next(event for event in of(WorkerStarting, events) if event.time > story.time_of(add))
    assert asked.time - story.time_of(add) < 5 + SLACK_S, "its process was asked for within 5 s of its node"

    assert "run.wait_timeout_s" in story.error.fix
    assert of(CheckpointSaved, events)[-1].step == story.finished, "the last one saved what it had"


def test_r6_slow_workers_are_waited_for_stuck_ones_replaced_and_deadly_rows_named(
    nodes: Nodes, stage: Stage, tmp_path: Path
) -> None:
    nodes.add(num_cpus=2)
    (stage.path / "step").write_text("6")
    sink: list[int] = []

    def stop_the_log(_: Story) -> None:
        sink.append(actor_pid("EventWriter"))
        os.kill(sink[0], signal.SIGSTOP)

    def stood_for_a_while(story: Story) -> bool:
        return time.time() > story.time_of(stop) + 2.5

    def kill(title: str) -> Part:
        return then(lambda _: os.kill(actor_pid(title), signal.SIGKILL))

    stop, go_on = then(stop_the_log), then(lambda _: os.kill(sink[0], signal.SIGCONT))
    die, halt = signal_rank(1), signal_rank(0, signal.SIGSTOP)
    parts = [
        *(trained(2), stop, stood_for_a_while, go_on, kill("EventWriter"), trained(2, steps=20)),
        *(kill("RendezvousActor"), die, seen(WorkerLost), trained(2), halt, seen(WorkerLost, 2), trained(2)),
        *(stage.ask("step", 1000), seen(WorkerLost, 3), trained(2), stage.ask("row 77 kills")),
    ]
    story = Story(stage.gate, *parts)
    limits = {"heartbeat_timeout_s": 3.0, "hang_timeout_s": 3.0, "collective_timeout_s": 2.0}
    more = {"workers": (2, 2), "drop_last": True, **LONG, **limits}  # all steps have the same shapes: one compilation
    _, events = run(tmp_path, story, stage.gate, stage.task, raises=PoisonRowsError, **more)

    generations, lost = of(GenerationFormed, events), of(WorkerLost, events)
    assert len([formed for formed in generations if formed.time < story.time_of(stop)]) == 1, "the slow step was waited for"
    finished = [at for event in of(StepsDone, events) for at in event.finished]
    assert sum(story.time_of(stop) < at < story.time_of(go_on) for at in finished) >= 4, "steps go on while the log stands"
    assert lost[1].reason.startswith("no heartbeat for ")
    assert lost[1].time - story.time_of(halt) < 3 + 5 + SLACK_S
    assert "in loss at step" in lost[2].reason, "only the one that sat in the user's code"
    assert restored(events) == [0], "nothing went back to a checkpoint"
    assert 77 in story.error.rows
    assert len(story.error.rows) <= 8, "the shares of one worker"
    assert len(lost) <= 3 + 4


class KillsANode:
    """Watches a sweep of one trial: kills the node of its reserved place once it has two workers, and waits for the next."""

    def __init__(self, nodes: Nodes, gate: Path, directory: Path) -> None:
        self.nodes, self.gate, self.directory = nodes, gate, directory
        self.killed_at = 0

    def show(self, view: SweepView, now: float) -> None:
        formed = of(GenerationFormed, list(read(RunDir.at(str(self.directory), "trial-0000"))))
        if not self.killed_at and formed and len(formed[-1].members) == 2 and view.trials[0].step > formed[-1].step + 2:
            first = next(member for member in formed[-1].members if member.worker == "w0")
            self.nodes.kill(self.nodes.of_pid(first.pid))
            self.nodes.add()
            self.killed_at = len(formed)
        if self.killed_at and any(len(event.members) == 2 for event in formed[self.killed_at :]):
            self.gate.unlink(missing_ok=True)

    def status(self, text: str, now: float) -> None:
        """Not looked at."""


def test_r15_a_trial_that_loses_its_reserved_place_with_a_node_goes_on(nodes: Nodes, tmp_path: Path, gate: Path) -> None:
    config = settings(name="sweep", storage=str(tmp_path), workers=(1, 2), cpus_per_worker=1.0, best="min:valid/mae")
    space, fixed = {"lr": tune.grid_search([0.05])}, {"gate": str(gate)}
    nodes.add()
    nodes.add()
    watcher = KillsANode(nodes, gate, tmp_path / "sweep")
    result = raytrain.Sweep(Gated, space, config=config, fixed=fixed, trials=1).fit(watcher)
    assert [trial.state for trial in result.view.trials] == ["completed"]
    run_dir = RunDir.at(str(tmp_path / "sweep"), "trial-0000")
    events = list(read(run_dir))
    assert restored(events) == [0], "the other one went on"
    assert [event.worker for event in of(WorkerLost, events)] == ["w0"]
    assert_same(run_dir, curve(read(run_dir)), by_hand("dropout", settings()))
