"""An error in the user's code ends the run soon, once, and is shown from the user's frame on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raytrain.config import RunConfig
from raytrain.data import arrays
from raytrain.errors import ResourceError
from raytrain.launch.trainer import Trainer
from raytrain.task import Loss, Task
from tests.cluster.job_process import JOB, JobProcess, events_of, wait_until_gone


class Points(Task):
    """Metrics in all forms that they may have."""

    num_rows: int = 16

    def data(self) -> Mapping[str, Any]:
        x = torch.arange(2.0 * self.num_rows).reshape(-1, 2) / 32
        return {"train": arrays(x=x), "valid": arrays(x=x[:3])}

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 1)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        result: torch.Tensor = model(batch["x"]).square().mean(1)
        return result

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        ones = torch.ones(len(batch["x"]))
        return {
            "numpy": np.float32(0.25),
            "number": 3,
            "scalar": torch.tensor(0.5),
            "rows": ones,
            "pair": Loss(ones.sum() * 6, 2 * len(ones)),
        }


def fit(tmp_path: Path, task: Task, **settings: Any) -> Any:
    settings = {"workers": 2, "global_batch": 8, "cpus_per_worker": 0.5, "storage": str(tmp_path), **settings}
    return Trainer(task, RunConfig(**settings)).fit()


@pytest.mark.usefixtures("small_ray")
def test_r11_workers_for_which_there_is_no_room_are_refused_quickly(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(ResourceError) as caught:
        fit(tmp_path, Points(), workers=5)
    assert time.monotonic() - start < 10
    assert (caught.value.where, caught.value.value) == ("run.workers", "at least 5 workers")
    assert caught.value.rule == "asked for 2.5 CPU, the cluster has 2"
    assert events_of(tmp_path, "points") == []


@pytest.mark.usefixtures("small_ray")
def test_r11_r17_three_rows_on_four_logical_workers_train_and_metrics_of_all_forms_are_numbers(tmp_path: Path) -> None:
    result = fit(tmp_path, Points(num_rows=3), logical_workers=4, epochs=2)
    assert (result.outcome, result.step) == ("completed", 2)
    found = {name: value for name, value in result.metrics.items() if name != "valid/loss"}
    expected = {"numpy": 0.25, "number": 3.0, "scalar": 0.5, "rows": 1.0, "pair": 3.0}
    assert found == pytest.approx({f"valid/{name}": value for name, value in expected.items()})


def test_r16_a_job_whose_loss_raises_ends_soon_and_shows_the_traceback_once(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    job = JobProcess(
        script,
        *["--fails", "3", "--run.epochs", "10", "--run.workers", "2"],
        *["--run.threads-per-worker", "3", "--run.forward-env", "TOKEN"],
        environment={"NCCL_DEBUG": "WARN", "TOKEN": "abc"},
    )
    code, ended = job.finish(), time.time()
    out, err = job.out, job.err
    assert code == 1, out + err
    lines = err.splitlines()
    start = lines.index("Traceback (most recent call last):")
    assert err.count("Traceback") + out.count("Traceback") == 1
    assert lines[start + 1].startswith(f'  File "{script}", line ')
    assert lines[start + 1].endswith(", in loss")
    assert lines[-2] == "KeyError: 'boom'"
    assert lines[-1] in ("error: raised by loss at step 2 on rank 0", "error: raised by loss at step 2 on rank 1")
    assert "raytrain/" not in "".join(lines[start:])

    raised = [float(line.split()[-1]) for line in out.splitlines() if "raised at" in line]
    assert raised
    assert ended - max(raised) < 10
    events = events_of(tmp_path / "runs", "line")
    assert [event.kind for event in events].count("run_ended") == 1
    assert len([event for event in events if event.kind == "worker_starting"]) == 2
    assert wait_until_gone(job, 5) == []

    # What the task prints has its rank; variables and threads are as asked for. (R18)
    assert "threads 3 WARN abc" in out
    assert "] about to fail" in out
    assert "UserWarning: this is a warning" in err
    noise = [line for line in lines[:start] if not line.startswith("[rank ")]
    assert noise == []
    assert "\r" not in out + err
    assert all(line[2] == ":" or line.startswith("[rank ") for line in out.splitlines()), out
