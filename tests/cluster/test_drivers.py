"""R1, R10, R16 on real Ray: drivers that are killed, stopped, or whose task raises, and what the next one finds."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raytrain
from raytrain.data import arrays
from raytrain.errors import ResourceError
from raytrain.events.curve import curve
from raytrain.events.kinds import CheckpointSaved, RunEnded, StateRestored, StepsDone, WorkerLost, WorkerStarting
from raytrain.report.audit import audit
from raytrain.rundir import RunDir
from raytrain.task import Loss
from tests.cluster.conftest import left_after
from tests.cluster.job_process import JobProcess, events_of, wait_until_gone
from tests.cluster.script import Script
from tests.laws.compare import assert_same, by_hand, settings
from tests.support import law_job
from tests.support.tasks import Regression

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("small_ray")]
ONE_EPOCH: dict[str, Any] = {"global_batch": 4, "epochs": 1, "checkpoint_every": 3}


def of(kind: type, events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copy(law_job.__file__, tmp_path_factory.mktemp("job")))


@pytest.fixture(scope="module")
def failing(script: Path) -> Iterator[JobProcess]:
    """A job with a Ray of its own whose loss raises; another one runs on this machine at the same time."""
    flags = ["--fails", "4", "--run.name", "fails", "--run.workers", "2", "--run.threads-per-worker", "3"]
    job = JobProcess(script, *flags, "--run.forward-env", "TOKEN", environment={"NCCL_DEBUG": "WARN", "TOKEN": "abc"})
    yield job
    job.process.kill()


class Drivers:
    """Processes that run the same command one after the other, with different numbers of workers."""

    def __init__(self, script: Path, gate: Path) -> None:
        self.script, self.gate, self.storage = script, gate, script.parent

    @property
    def events(self) -> list[Any]:
        return events_of(self.storage, "run") if (self.storage / "run").exists() else []

    def start(self, workers: int, **environment: str) -> JobProcess:
        """Returns once it has saved a checkpoint more than there were at its start."""
        flags = {
            "name": "run",
            "storage": self.storage,
            "workers": workers,
            "stop-grace-s": 10,
            **{name.replace("_", "-"): value for name, value in ONE_EPOCH.items()},
        }
        words = [str(word) for name, value in flags.items() for word in (f"--run.{name}", value)]
        before = len(of(CheckpointSaved, self.events))
        job = JobProcess(self.script, *words, "--gate", str(self.gate), environment=environment)
        until = time.monotonic() + 90
        while len(of(CheckpointSaved, self.events)) == before:
            assert job.process.poll() is None, job.err
            assert time.monotonic() < until, f"no checkpoint: {job.err}"
            time.sleep(0.05)
        return job

    def check_stop(self, job: JobProcess, number: signal.Signals, group: bool = False) -> None:
        """A signal ends the run at a step, with a checkpoint and a plain statement; no worker dies of it."""
        asked = time.monotonic()
        job.signal(number, group)
        if group:  # `timeout` signals its child, and then the group
            job.signal(number)
        assert job.finish() == 128 + number, job.out + job.err
        assert time.monotonic() - asked < 10
        ended = of(RunEnded, self.events)[-1]
        assert (ended.outcome, ended.step) == ("stopped", of(CheckpointSaved, self.events)[-1].step)
        assert ended.step == max(event.first_step + len(event.losses) for event in of(StepsDone, self.events))
        assert f"stopped      step {ended.step} of 51" in job.out
        assert f"start the same job again: it resumes from step {ended.step}" in job.out
        err = [line for line in job.err.splitlines() if "id.h:" not in line]  # Ray's, of a node that has just gone
        assert (err, "\r" in job.out, "\x1b" in job.out) == ([], False, False)
        assert len([line for line in job.out.splitlines() if " loss " in line]) <= 2, "one line of progress per interval"
        assert not of(WorkerLost, self.events)


def test_r1_r10_r16_killed_and_stopped_drivers_leave_the_uninterrupted_run(
    script: Path, gate: Path, small_ray: str, failing: JobProcess
) -> None:
    drivers = Drivers(script, gate)
    job = drivers.start(workers=2)
    assert any("raylet" in command for command in job.left_behind()), "they are found"
    drivers.check_stop(job, signal.SIGTERM, group=True)  # of which Ray's own processes must not hear
    (script.parent / "run/run.json").write_text('{"half')  # the manifests have the same content (R7)
    assert wait_until_gone(job, 5) == []
    assert not [event.pid for event in of(WorkerStarting, drivers.events) if Path(f"/proc/{event.pid}").exists()]

    job = drivers.start(workers=1, RAY_ADDRESS=small_ray)
    os.kill(job.process.pid, signal.SIGKILL)
    job.finish()
    assert left_after(30) == [], "the cluster has all of its workers' places back"

    drivers.check_stop(drivers.start(workers=3, RAY_ADDRESS=small_ray), signal.SIGHUP)

    gate.unlink()
    run_dir = RunDir.at(str(script.parent), "run")
    config = settings(**ONE_EPOCH, storage=str(script.parent), workers=2)
    trainer = raytrain.Trainer(law_job.Job(gate=str(gate)), config)
    result = trainer.fit()
    assert (result.outcome, result.step) == ("completed", 51)
    assert_same(run_dir, curve(drivers.events), by_hand("dropout", settings(global_batch=4, epochs=1)))
    assert audit(run_dir).passed
    begun, *restored = [event.step for event in of(StateRestored, drivers.events)]
    assert (begun, len(restored)) == (0, 3)
    assert restored == sorted(restored)
    assert trainer.fit().outcome == "already complete"


def test_r16_r18_a_job_whose_loss_raises_ends_soon_with_one_traceback(failing: JobProcess, script: Path) -> None:
    code, ended = failing.finish(), time.time()
    out, err = failing.out, failing.err
    assert code == 1, out + err
    lines = err.splitlines()
    start = lines.index("Traceback (most recent call last):")
    assert err.count("Traceback") + out.count("Traceback") == 1
    assert lines[start + 1].startswith(f'  File "{script}", line ')
    assert lines[start + 1].endswith(", in loss")
    assert lines[-2] == "KeyError: 'boom'"
    assert lines[-1] in ("error: raised by loss at step 1 on rank 0", "error: raised by loss at step 1 on rank 1")
    assert "raytrain/" not in "".join(lines[start:])
    events = events_of(script.parent / "runs", "fails")
    (stop,) = of(RunEnded, events)
    assert stop.time - max(float(line.split()[-1]) for line in out.splitlines() if "raised at" in line) < 10
    assert ended > stop.time
    assert len(of(WorkerStarting, events)) == 2, "it is not tried again"
    assert wait_until_gone(failing, 5) == []

    # What the task prints has its rank; variables and threads are as asked for. (R18)
    assert "threads 3 WARN abc" in out
    assert "] about to fail" in out
    assert "UserWarning: this is a warning" in err
    assert [line for line in lines[:start] if not line.startswith("[rank ")] == []
    assert "\r" not in out + err
    assert all(line[2] == ":" or line.startswith("[rank ") for line in out.splitlines()), out


class Points(Regression):
    """Few rows; metrics in all forms that they may have; steps as slow as one likes."""

    num_rows: int = 3
    step_s: float = 0.0

    def data(self) -> dict[str, Any]:
        x = torch.arange(12.0 * self.num_rows).reshape(-1, 12) / 100
        return {"train": arrays(x=x, y=x[:, :1]), "valid": arrays(x=x, y=x[:, :1])}

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            time.sleep(self.step_s)
        return super().loss(model, batch)

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        ones = torch.ones(len(batch["x"]))
        pair = Loss(ones.sum() * 6, 2 * len(ones))
        return {"numpy": np.float32(0.25), "number": 3, "scalar": torch.tensor(0.5), "rows": ones, "pair": pair}


class StopsTwice(Script):
    """Sends two signals as soon as workers train."""

    def act(self) -> None:
        if self.generation and not self.of(RunEnded):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)


def fit(task: Points, viewer: Script | None = None, **more: Any) -> Any:
    config = settings(**{"workers": 2, "global_batch": 8, "epochs": 2, "stop_grace_s": 60.0, **more})
    return raytrain.Trainer(task, config).fit(viewer)


def test_r11_r16_r17_a_second_signal_ends_a_run_at_once_and_the_next_one_starts(tmp_path: Path) -> None:
    """The next one has fewer rows than logical workers, and metrics of all forms are numbers."""
    viewer, start = StopsTwice(), time.monotonic()
    stopped = fit(Points(step_s=100), viewer, storage=str(tmp_path / "first"))
    assert (stopped.outcome, stopped.step, stopped.stopped_by) == ("stopped", 0, signal.SIGINT)
    assert viewer.of(RunEnded)[0].message == "a second signal ended the run immediately"
    assert time.monotonic() - start < 60

    result = fit(Points(), storage=str(tmp_path / "second"))
    assert (result.outcome, result.step) == ("completed", 2)
    found = {name: value for name, value in result.metrics.items() if name != "valid/loss"}
    expected = {"numpy": 0.25, "number": 3.0, "scalar": 0.5, "rows": 1.0, "pair": 3.0}
    assert found == pytest.approx({f"valid/{name}": value for name, value in expected.items()})


def test_r11_workers_for_which_there_is_no_room_are_refused_quickly(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(ResourceError) as caught:
        fit(Points(), workers=5, logical_workers=5, storage=str(tmp_path))
    assert time.monotonic() - start < 10
    assert (caught.value.where, caught.value.value) == ("run.workers", "at least 5 workers")
    assert caught.value.rule == "asked for 2.5 CPU, the cluster has 2"
    assert not (tmp_path / "run" / "events").exists()
