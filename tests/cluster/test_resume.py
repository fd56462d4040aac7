"""P4, P5 on real Ray: the driver is killed twice inside one epoch, and the run is the uninterrupted one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from raytrain.events.curve import curve
from raytrain.events.kinds import CheckpointSaved, StateRestored
from raytrain.events.log import read
from raytrain.report.audit import audit
from raytrain.rundir import RunDir
from tests.cluster.job_process import JobProcess, wait_until_gone
from tests.laws.compare import assert_same, by_hand, settings
from tests.support import law_job

ROOT = Path(__file__).parents[2]
RAY_AGENTS = ("DashboardAgent", "RuntimeEnvAgent")  # Ray's own; they notice the end of their raylet after a while
ONE_EPOCH = {"global_batch": 4, "epochs": 1}


def start(tmp_path: Path, gate: Path, workers: int) -> JobProcess:
    script = tmp_path / "law_job.py"
    script.write_text(Path(law_job.__file__).read_text())
    flags = {
        "--run.storage": tmp_path,
        "--run.name": "run",
        "--run.workers": workers,
        "--run.global-batch": ONE_EPOCH["global_batch"],
        "--run.epochs": ONE_EPOCH["epochs"],
        "--run.checkpoint-every": 3,
        "--gate": gate,
    }
    return JobProcess(script, *(str(part) for pair in flags.items() for part in pair), environment={"PYTHONPATH": str(ROOT)})


def num_saved(run_dir: RunDir) -> int:
    return sum(isinstance(event, CheckpointSaved) for event in read(run_dir))


def wait_for_checkpoint(run_dir: RunDir, job: JobProcess, timeout_s: float = 90) -> None:
    """Returns once the job has saved a checkpoint more than there were at its start; no other job writes here."""
    before, until = num_saved(run_dir), time.monotonic() + timeout_s
    while num_saved(run_dir) == before:
        assert job.process.poll() is None, job.err
        assert time.monotonic() < until, f"no checkpoint: {job.err}"
        time.sleep(0.05)


@pytest.mark.timeout(240)
def test_r1_r10_a_driver_that_is_killed_twice_in_an_epoch_changes_nothing(tmp_path: Path) -> None:
    gate, run_dir = tmp_path / "gate", RunDir.at(str(tmp_path), "run")
    gate.touch()
    for workers in (1, 2):
        job = start(tmp_path, gate, workers)
        wait_for_checkpoint(run_dir, job)
        os.kill(job.process.pid, signal.SIGKILL)
        job.finish()
        left = wait_until_gone(job, timeout_s=30, besides=RAY_AGENTS)
        assert left == []
    gate.unlink()
    job = start(tmp_path, gate, workers=3)
    assert job.finish() == 0, job.err
    assert_same(run_dir, curve(read(run_dir)), by_hand("dropout", settings(**ONE_EPOCH)))
    report = audit(run_dir)
    assert report.passed, report.lines()
    restored = [event.step for event in read(run_dir) if isinstance(event, StateRestored)]
    assert len(restored) == 3
    assert 0 < restored[1] < restored[2] < 51

    again = start(tmp_path, gate, workers=1)
    assert again.finish() == 0
    assert "already complete" in again.out
