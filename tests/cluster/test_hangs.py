"""R6 and the parts of our own on real Ray: what does not answer is found out, what dies comes back, nothing waits for it."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import raytrain
from raytrain.errors import DeadlyRowsError
from raytrain.events.curve import curve
from raytrain.events.kinds import CheckpointFailed, CheckpointSaved, GenerationFormed, StateRestored, WorkerLost
from raytrain.events.log import read
from tests.cluster.script import Script, Story, actor_pid, run, seen, signal_rank, then, trained
from tests.laws.compare import settings
from tests.support.tasks import Gated

pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("small_ray")]
QUICK = {"heartbeat_timeout_s": 3.0, "hang_timeout_s": 4.0, "collective_timeout_s": 4.0}


class Sleepy(Gated):
    """The first process that finds the file `bed` in a training step removes it, and sleeps for `sleep_s` there."""

    bed: str = ""
    sleep_s: float = 1000.0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if model.training and isinstance(model, nn.parallel.DistributedDataParallel) and self.bed:
            try:
                os.unlink(self.bed)
            except FileNotFoundError:
                pass
            else:
                time.sleep(self.sleep_s)
        return super().loss(model, batch)


class Deadly(Gated):
    """A row that kills whatever process trains on it."""

    row: int = 77

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if model.training and isinstance(model, nn.parallel.DistributedDataParallel) and (batch["row"] == self.row).any():
            ctypes.string_at(0)
        return super().loss(model, batch)


def restored(events: list[Any]) -> list[int]:
    return [event.step for event in events if isinstance(event, StateRestored)]


def test_r6_parts_of_our_own_die_and_a_stopped_worker_is_replaced_within_30_s_with_the_defaults(
    tmp_path: Path, gate: Path
) -> None:
    story = Story(
        gate,
        trained(2),
        then(lambda _: os.kill(actor_pid("EventSink"), signal.SIGKILL)),
        trained(2, steps=6),
        then(lambda _: os.kill(actor_pid("RendezvousActor"), signal.SIGKILL)),
        signal_rank(1),
        seen(WorkerLost),
        trained(2),
        signal_rank(0, signal.SIGSTOP),
        seen(WorkerLost, 2),
        trained(2),
    )
    _, events = run(tmp_path, story, gate, workers=(1, 2), epochs=8)
    assert story.of(WorkerLost)[1].reason.startswith("no heartbeat for 1")
    formed = [g for g in events if isinstance(g, GenerationFormed) and g.cause == "loss"]
    assert formed[-1].time - story.times[7] < 30
    assert restored(events) == [0], "nothing went back to a checkpoint"


def test_r6_a_rank_that_sits_in_the_users_code_is_killed_and_its_place_is_named(tmp_path: Path, gate: Path) -> None:
    bed = tmp_path / "bed"
    story = Story(gate, trained(2), then(lambda _: bed.touch()), seen(WorkerLost), trained(2))
    _, events = run(tmp_path, story, gate, Sleepy(gate=str(gate), bed=str(bed)), workers=(1, 2), **QUICK)
    assert "in loss at step" in story.of(WorkerLost)[0].reason
    assert restored(events) == [0]


def test_r6_a_slow_first_step_is_not_taken_for_a_hang(tmp_path: Path, gate: Path) -> None:
    bed = tmp_path / "bed"
    bed.touch()
    story = Story(gate, trained(2, steps=5))
    task = Sleepy(gate=str(gate), bed=str(bed), sleep_s=9.0)
    _, events = run(tmp_path, story, gate, task, workers=(2, 2), logical_workers=4, **QUICK)
    generations = [event for event in events if isinstance(event, GenerationFormed)]
    assert not bed.exists()
    assert len(generations) > 1, "nobody noticed that the first step was slow"
    assert len({tuple(sorted(member.pid for member in g.members)) for g in generations}) == 1
    assert not story.of(WorkerLost)


def test_a_row_that_kills_its_process_ends_the_run_and_is_named(tmp_path: Path, gate: Path) -> None:
    gate.unlink()
    with pytest.raises(DeadlyRowsError) as caught:
        run(tmp_path, Nobody(), gate, Deadly(gate=str(gate)), workers=(2, 2), logical_workers=4)
    assert 77 in caught.value.rows
    assert len(caught.value.rows) <= 8, "the shares of one worker"
    events = read(raytrain.Trainer(Gated(), settings(storage=str(tmp_path))).run_dir)
    assert sum(isinstance(event, WorkerLost) for event in events) <= 4


class Nobody(Script):
    def act(self) -> None:
        return None


def test_training_does_not_wait_for_an_event_log_that_stalls(tmp_path: Path, gate: Path) -> None:
    stopped: list[int] = []

    def stop(_: Story) -> None:
        stopped.append(actor_pid("EventSink"))
        os.kill(stopped[0], signal.SIGSTOP)

    def five_seconds_later(story: Story) -> bool:
        return time.time() > story.times[1] + 5

    wake = then(lambda _: os.kill(stopped[0], signal.SIGCONT))
    story = Story(gate, trained(2), then(stop), five_seconds_later, wake, trained(2, steps=12))
    run_dir, _ = run(tmp_path, story, gate, workers=(2, 2), logical_workers=4, checkpoint_every=100)
    finished = [record.finished for record in curve(read(run_dir)).values()]
    during = [moment for moment in finished if story.times[1] < moment < story.times[2]]
    assert len(during) >= 5, "steps went on while the log stood still"


def test_r7_training_goes_on_while_the_store_fails_and_checkpoints_come_back_with_it(tmp_path: Path, gate: Path) -> None:
    checkpoints, aside = tmp_path / "run" / "checkpoints", tmp_path / "aside"

    def break_it(_: Story) -> None:
        checkpoints.rename(aside)
        checkpoints.write_text("a file where a directory should be")

    def mend_it(_: Story) -> None:
        checkpoints.unlink()
        aside.rename(checkpoints)

    story = Story(
        gate, seen(CheckpointSaved), then(break_it), seen(CheckpointFailed), then(mend_it), seen(CheckpointSaved, 2)
    )
    _, events = run(tmp_path, story, gate, workers=(1, 1))
    assert restored(events) == [0]
