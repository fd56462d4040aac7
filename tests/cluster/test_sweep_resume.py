"""R15 on real Ray: the driver of a sweep is killed, and the same command ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from raytrain.events.kinds import EvaluationDone, RunStarted, StateRestored, StepsDone
from raytrain.events.log import read
from raytrain.rundir import RunDir
from tests.cluster.job_process import RAY_AGENTS, ROOT, JobProcess, wait_until_gone
from tests.laws.compare import settings
from tests.support import swept
from tests.support.local import LocalRun, Plot
from tests.support.tasks import Gated


def start(storage: Path, gate: Path) -> JobProcess:
    script = storage / "swept.py"
    script.write_text(Path(swept.__file__).read_text())
    return JobProcess(script, str(storage), str(gate), environment={"PYTHONPATH": str(ROOT)})


def events_of(storage: Path, trial: int) -> list[Any]:
    return list(read(RunDir.at(str(storage / "sweep"), f"trial-{trial:04d}")))


def wait_for_step(storage: Path, trial: int, step: int, job: JobProcess) -> None:
    until = time.monotonic() + 90
    while max((e.first_step for e in events_of(storage, trial) if isinstance(e, StepsDone)), default=0) < step:
        assert job.process.poll() is None, job.err
        assert time.monotonic() < until, job.err
        time.sleep(0.1)


def expected_table(storage: Path) -> pd.DataFrame:
    """The outcome of the trials, each as a run without Ray; the last one is stopped after its first epoch."""
    rows = []
    for number, (lr, state) in enumerate(zip(swept.RATES, ("completed", "completed", "stopped"), strict=True)):
        config = settings(storage=str(storage), name=f"alone-{number}", checkpoint_every=5)
        run = LocalRun(Gated(lr=lr), config, storage, Plot(1))
        run.run()
        values = {e.step: e.metrics["valid/mae"] for e in read(run.run_dir) if isinstance(e, EvaluationDone)}
        values = values if state == "completed" else {13: values[13]}
        best = min(values, key=values.__getitem__)
        row = {"trial": f"trial-{number:04d}", "state": state, "lr": lr, "step": max(values), "valid/mae": values[best]}
        rows.append({**row, "best step": best, "newest": values[max(values)]})
    assert rows[2]["newest"] > max(row["valid/mae"] for row in rows[:2]), "the last one is worse than both"
    return pd.DataFrame(rows)


@pytest.mark.timeout(200)
def test_r15_a_sweep_whose_driver_is_killed_resumes_to_the_same_table(tmp_path: Path, gate: Path) -> None:
    job = start(tmp_path, gate)
    wait_for_step(tmp_path, 1, 20, job)
    os.kill(job.process.pid, signal.SIGKILL)
    job.finish()
    assert wait_until_gone(job, timeout_s=30, besides=RAY_AGENTS) == []
    gate.unlink()
    job = start(tmp_path, gate)
    expected = expected_table(tmp_path / "plain")
    assert job.finish(120) == 0, job.err
    pd.testing.assert_frame_equal(pd.read_json(tmp_path / "table.json"), expected, rtol=1e-6)
    starts = [sum(isinstance(event, RunStarted) for event in events_of(tmp_path, trial)) for trial in range(3)]
    assert starts == [1, 2, 1], "what had ended was not run again"
    restored = [event.step for event in events_of(tmp_path, 1) if isinstance(event, StateRestored)]
    assert restored[0] == 0 < restored[1], "what ran continued from its checkpoint"
