"""R6 and the parts of our own on real Ray: what does not answer is found out, what dies comes back, nothing waits for it."""

from __future__ import annotations

import contextlib
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
from raytrain.events.kinds import GenerationFormed, StateRestored, WorkerLost
from raytrain.events.log import read
from tests.cluster.script import Script, Story, actor_pid, run, seen, signal_rank, then, trained
from tests.laws.compare import settings
from tests.support.tasks import Gated

pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("small_ray")]
QUICK = {"heartbeat_timeout_s": 3.0, "hang_timeout_s": 4.0, "collective_timeout_s": 4.0}


class Sleepy(Gated):
    """The first process that finds the file `bed` in a training step takes it, and sleeps there as long as it says."""

    bed: str = ""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if model.training and isinstance(model, nn.parallel.DistributedDataParallel):
            with contextlib.suppress(FileNotFoundError):
                mine = f"{self.bed}-{os.getpid()}"
                os.rename(self.bed, mine)
                time.sleep(float(Path(mine).read_text()))
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


def test_r6_what_is_slow_is_waited_for_what_is_stuck_is_not_and_the_log_may_stand_still(tmp_path: Path, gate: Path) -> None:
    bed = tmp_path / "bed"
    bed.write_text("9")
    stopped: list[int] = []

    def stop_the_log(_: Story) -> None:
        stopped.append(actor_pid("EventSink"))
        os.kill(stopped[0], signal.SIGSTOP)

    story = Story(
        gate,
        trained(2, steps=3),
        then(stop_the_log),
        lambda story: time.time() > story.times[-1] + 5,
        then(lambda _: os.kill(stopped[0], signal.SIGCONT)),
        trained(2, steps=20),
        then(lambda _: bed.write_text("1000")),
        seen(WorkerLost),
        trained(2),
    )
    task, more = Sleepy(gate=str(gate), bed=str(bed)), {"workers": (2, 2), "logical_workers": 4, "epochs": 12}
    run_dir, events = run(tmp_path, story, gate, task, **more, **QUICK)

    generations = [event for event in events if isinstance(event, GenerationFormed)]
    stuck = story.of(WorkerLost)
    false_alarms = [g for g in generations if g.time < story.times[0] + 1]
    assert len(false_alarms) > 1, "nobody noticed that the first step was slow"
    assert len({tuple(sorted(member.pid for member in g.members)) for g in false_alarms}) == 1
    finished = [record.finished for record in curve(read(run_dir)).values()]
    during = [moment for moment in finished if story.times[1] < moment < story.times[2]]
    assert len(during) >= 5, "steps went on while the log stood still"
    assert len(stuck) == 1, "only the one that sat in the user's code"
    assert "in loss at step" in stuck[0].reason
    assert restored(events) == [0]


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
