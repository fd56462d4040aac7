"""R15 on real Ray: the driver of a sweep is killed, and the same command goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from raytrain.events.kinds import RunStarted, StateRestored, StepsDone
from raytrain.events.log import read
from raytrain.rundir import RunDir
from tests.cluster.job_process import JobProcess, wait_until_gone
from tests.cluster.test_resume import RAY_AGENTS, ROOT
from tests.support import swept


def start(storage: Path, gate: Path) -> JobProcess:
    storage.mkdir(exist_ok=True)
    script = storage / "swept.py"
    script.write_text(Path(swept.__file__).read_text())
    return JobProcess(script, str(storage), str(gate), environment={"PYTHONPATH": str(ROOT)})


def events_of(storage: Path, trial: int) -> list[Any]:
    return list(read(RunDir.at(str(storage / "sweep"), f"trial-{trial:04d}")))


def table(storage: Path) -> pd.DataFrame:
    return pd.read_json(storage / "table.json")


def wait_for_step(storage: Path, trial: int, step: int, job: JobProcess) -> None:
    until = time.monotonic() + 90
    while max((e.first_step for e in events_of(storage, trial) if isinstance(e, StepsDone)), default=0) < step:
        assert job.process.poll() is None, job.err
        assert time.monotonic() < until, job.err
        time.sleep(0.1)


@pytest.mark.timeout(280)
def test_r15_a_sweep_whose_driver_is_killed_goes_on_and_ends_with_the_same_table(tmp_path: Path, gate: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    job = start(whole, tmp_path / "none")
    assert job.finish(120) == 0, job.err
    expected = table(whole)
    assert list(expected["state"]) == ["completed", "completed", "stopped"], "the last one is worse than both"

    job = start(killed, gate)
    wait_for_step(killed, 1, 20, job)
    os.kill(job.process.pid, signal.SIGKILL)
    job.finish()
    assert wait_until_gone(job, timeout_s=30, besides=RAY_AGENTS) == []
    gate.unlink()
    job = start(killed, gate)
    assert job.finish(120) == 0, job.err
    found = table(killed)
    pd.testing.assert_frame_equal(found, expected, rtol=1e-6)
    starts = [sum(isinstance(event, RunStarted) for event in events_of(killed, trial)) for trial in range(3)]
    assert starts == [1, 2, 1], "what had ended was not run again"
    restored = [event.step for event in events_of(killed, 1) if isinstance(event, StateRestored)]
    assert restored[0] == 0 < restored[1], "what ran went on from its checkpoint"
