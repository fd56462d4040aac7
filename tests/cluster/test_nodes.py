"""P1 to P4 on real Ray with whole nodes: they die, come, come back, and are announced to go away."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from torch import nn

from raytrain.errors import ResourceError
from raytrain.events.kinds import (
    CheckpointSaved,
    StepsDone,
    WaitingForWorkers,
    WorkerLeaving,
    WorkerLeft,
    WorkerLost,
    WorkerStarting,
)
from tests.cluster.nodes import Nodes, head_alone, later, nodes_of, play, restored
from tests.cluster.script import Story, run, seen, then, trained
from tests.support.tasks import Gated

pytestmark = pytest.mark.timeout(150)
SLACK_S = 2.0  # of a machine that does other things too


class Marked(Gated):
    """Once each in a run, a warm-up pass, an evaluation and the copy for a checkpoint take a while, with the process noted.

    The last one after the file `armed` is there, since states are looked at for other reasons too.
    """

    marks: str = ""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            self._linger("start" if model.training else "evaluation")
        return super().loss(model, batch)

    def model(self) -> nn.Module:
        model = super().model()

        def hook(*_: Any) -> None:
            if Path(self.marks, "armed").exists():
                self._linger("save")

        model.register_state_dict_post_hook(hook)
        return model

    def _linger(self, part: str) -> None:
        """The first process that comes here stays for some seconds, and names itself in a file for that time."""
        mark = Path(self.marks, part)
        try:
            descriptor = os.open(mark.with_suffix(".once"), os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return
        os.close(descriptor)
        mark.with_suffix(".new").write_text(str(os.getpid()))
        mark.with_suffix(".new").rename(mark)
        time.sleep(2.0)
        mark.unlink()


@pytest.fixture(scope="module")
def head() -> Iterator[Cluster]:
    with head_alone() as cluster:
        yield cluster


@pytest.fixture
def nodes(head: Cluster) -> Iterator[Nodes]:
    with nodes_of(head) as some:
        yield some


def test_nodes_die_with_several_workers_with_rank_0_and_one_after_the_other(
    nodes: Nodes, tmp_path: Path, gate: Path
) -> None:
    nodes.add(num_cpus=2)
    nodes.add()

    def kill_rank_0(story: Story) -> None:
        nodes.kill(nodes.of_rank(story, 0))

    def add_two(_: Story) -> None:
        nodes.add()
        nodes.add()

    parts = [
        trained(3),
        then(lambda _: nodes.kill(0)),
        seen(WorkerLost, 2),
        trained(1, steps=1),
        then(add_two),
        trained(3),
        then(kill_rank_0),
        later(2),
        lambda story: len(story.members) == 2,
        then(kill_rank_0),
        trained(1),
    ]
    events, generations, story = play(tmp_path, gate, parts, workers=(1, 3), logical_workers=4, epochs=6)
    assert restored(events) == [0], "nothing went back to a checkpoint"
    before, after = (next(g for g in generations if len(g.members) == size) for size in (3, 1))
    assert {m.pid for m in after.members} < {m.pid for m in before.members}, "the survivor is the process that it was"
    joined = [e for e in events if isinstance(e, WorkerStarting) and e.time > story.times[4]]
    assert joined[0].time - story.times[4] < 5 + SLACK_S, (
        "its process, which takes seconds to start, was asked for within 5 s"
    )
    assert all(g.pause_s < 2 for g in generations if g.cause == "join")


def test_below_the_minimum_workers_wait_and_when_all_die_a_checkpoint_is_restored(
    nodes: Nodes, tmp_path: Path, gate: Path
) -> None:
    nodes.add()
    nodes.add()

    def storm(_: Story) -> None:
        for node in list(nodes.cluster.worker_nodes):
            nodes.cluster.remove_node(node, allow_graceful=False)

    def back(_: Story) -> None:
        nodes.add()
        nodes.add()

    parts = [
        trained(2),
        then(lambda story: nodes.kill(nodes.of_rank(story, 1))),
        seen(WaitingForWorkers),
        then(lambda _: nodes.add()),
        trained(2),
        then(storm),
        seen(WorkerLost, 3),
        then(back),
        trained(2),
    ]
    events, generations, story = play(tmp_path, gate, parts, workers=(2, 2), logical_workers=4, epochs=4)
    assert (story.of(WaitingForWorkers)[0].have, story.of(WaitingForWorkers)[0].need) == (1, 2)
    assert max(g.waiting_s for g in generations) > 3
    first, second = restored(events)
    assert first == 0, "the survivor kept its state while it waited"
    assert second >= 3, "when all had died, the newest checkpoint was where the run went on"


def test_a_wait_that_is_too_long_ends_with_a_checkpoint_and_says_why(nodes: Nodes, tmp_path: Path, gate: Path) -> None:
    nodes.add()
    nodes.add()
    kill = then(lambda story: nodes.kill(nodes.of_rank(story, 1)))
    story = Story(gate, trained(2), kill)
    with pytest.raises(ResourceError, match="wait_timeout_s"):
        run(
            tmp_path,
            story,
            gate,
            Gated(gate=str(tmp_path / "none")),
            workers=(2, 2),
            logical_workers=4,
            cpus_per_worker=1.0,
            wait_timeout_s=4.0,
            epochs=400,
            checkpoint_every=10_000,
        )
    saved = story.of(CheckpointSaved)
    assert saved[-1].step >= story.generation.step if story.generation else False


def test_r2_drained_workers_leave_at_once_and_the_last_ones_leave_a_checkpoint(
    nodes: Nodes, tmp_path: Path, gate: Path
) -> None:
    for _ in range(4):
        nodes.add()

    def drain_ranks(*ranks: int) -> Callable[[Story], bool]:
        def do(story: Story) -> None:
            for number in [nodes.of_rank(story, rank) for rank in ranks]:
                nodes.drain(number, deadline_s=20)

        return then(do)

    parts = [
        trained(3),
        drain_ranks(0),
        seen(WorkerLeft),
        trained(3),
        drain_ranks(0, 2),
        seen(WorkerLeft, 3),
        trained(1),
        drain_ranks(0),
        seen(WorkerLeft, 4),
        then(lambda _: nodes.add()),
        trained(1),
    ]
    more = {"workers": (1, 3), "logical_workers": 4, "checkpoint_every": 1000, "max_failures": 0, "epochs": 6}
    events, generations, story = play(tmp_path, gate, parts, **more)
    assert not story.of(WorkerLost)
    departures = [g for g in generations if g.cause == "drain" and g.step]
    assert [len(g.members) for g in departures[:2]] == [2, 1], "two drains close together are one change"
    for departure, notice in zip(departures[:2], (story.times[1], story.times[4]), strict=True):
        assert departure.time - notice < 4 * 0.15 + 1 + SLACK_S, "under a step and 1 s"
        assert departure.pause_s < 2
    first, second = restored(events)
    saved = next(event for event in events if isinstance(event, CheckpointSaved) and event.step == second)
    assert first == 0
    assert saved.time < story.times[7] + 20, "before the deadline"
    records = [event for event in events if isinstance(event, StepsDone)]
    assert sum(len(event.losses) for event in records) == 6 * 13, "no step was lost or done again"
    assert len(story.of(WorkerLeaving)) == 4


def test_drains_in_an_evaluation_a_first_pass_and_a_save(nodes: Nodes, tmp_path: Path, gate: Path) -> None:
    for _ in range(2):
        nodes.add()
    marks = tmp_path / "marks"
    marks.mkdir()

    def drain_where(mark: str, number: int) -> list[Callable[[Story], bool]]:
        """Drains the node of a process that is in the middle of something, and adds a new one."""

        def do(_: Story) -> None:
            nodes.drain(nodes.of_pid(int((marks / mark).read_text())), deadline_s=30)
            nodes.add()

        return [lambda _: (marks / mark).exists(), then(do), seen(WorkerLeft, number)]

    arm = then(lambda _: (marks / "armed").touch())
    in_save = [trained(2), arm, *drain_where("save", 3)]
    parts = [*drain_where("start", 1), *drain_where("evaluation", 2), *in_save, trained(2)]
    task = Marked(gate=str(gate), marks=str(marks))
    more = {"workers": (1, 2), "checkpoint_every": 4, "eval_every": 5, "max_failures": 0, "epochs": 8}
    events, _, story = play(tmp_path, gate, parts, task=task, **more)
    assert not story.of(WorkerLost)
    records = [event for event in events if isinstance(event, StepsDone)]
    assert sum(len(event.losses) for event in records) == 8 * 13, "no step was lost or done again"
    assert len(story.of(WorkerLeft)) == 3
