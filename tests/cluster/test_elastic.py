"""P1, P2, P3 on real Ray: workers are killed and join, nobody else restarts, and the result stays the same."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from raytrain.checkpoint.store import CheckpointStore
from raytrain.events.kinds import GenerationFormed, StateRestored, StepsDone, WorkerLost, WorkerStarting
from raytrain.events.log import read
from tests.cluster.script import Story, run, seen, signal_rank, then, trained
from tests.laws.compare import settings
from tests.support.local import LocalRun, Plot
from tests.support.tasks import Gated

pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("small_ray")]


def kill_all(story: Story) -> None:
    for member in story.members:
        os.kill(member.pid, signal.SIGKILL)


def steps_of(events: list[Any]) -> list[int]:
    return [e.first_step + i for e in events if isinstance(e, StepsDone) for i in range(len(e.losses))]


def test_r2_one_process_restarts_when_the_leader_is_killed_and_when_all_are_killed_a_checkpoint_is_restored(
    tmp_path: Path, gate: Path
) -> None:
    """To the last bit, too: the files of the last checkpoint are those of one process without Ray."""
    more: dict[str, Any] = {"logical_workers": 4, "exactness": "bitwise", "checkpoint_every": 3}
    leader_dies = [trained(2), signal_rank(0), seen(WorkerLost), trained(2)]
    story = Story(gate, *leader_dies, then(kill_all), seen(WorkerLost, 3), trained(2))
    run_dir, events = run(tmp_path, story, gate, workers=(1, 2), **more)
    restored = [event for event in events if isinstance(event, StateRestored)]
    assert restored[0].step == 0
    assert restored[1:], "the second time everybody was gone"
    assert all(again.step >= 3 for again in restored[1:])

    before = list(itertools.takewhile(lambda event: event is not restored[1], events))
    generations = [event for event in before if isinstance(event, GenerationFormed)]
    loss = next(g for g in generations if g.cause == "loss")
    first = next(g for g in generations if len(g.members) == 2)
    started = {event.pid for event in before if isinstance(event, WorkerStarting)}
    survivor = {member.pid for member in loss.members}
    assert len(survivor) == 1
    assert survivor < {member.pid for member in first.members}, "the survivor is the process that it was"
    assert first.members[0].pid not in survivor, "the leader was killed"
    assert survivor <= {member.pid for g in generations for member in g.members if g.time > loss.time}
    assert loss.pause_s < 10
    until_join = steps_of(before[: before.index(generations[-1])])
    assert until_join == list(range(len(until_join))), "no committed step was done again"
    assert len([event for event in before if isinstance(event, WorkerLost)]) <= 3 <= len(started)

    config = settings(storage=str(tmp_path / "plain"), workers=(1, 4), **more)
    plain = LocalRun(Gated(), config, tmp_path / "plain", Plot(1))
    losses = plain.run()
    assert files_of(run_dir) == files_of(plain.run_dir)
    assert losses
    assert list(read(plain.run_dir))


def files_of(run_dir: Any) -> dict[str, str]:
    """SHA-256 of each file of the newest checkpoint."""
    newest = CheckpointStore(run_dir).newest_verified()
    assert newest is not None
    return {name: entry.sha256 for name, entry in newest.manifest.files.items()}
