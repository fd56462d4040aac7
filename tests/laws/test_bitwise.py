"""P3 to the last bit: with `exactness` bitwise, checkpoints are equal byte for byte, whatever happened to workers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.errors import ConfigError
from raytrain.events.kinds import EvaluationDone
from raytrain.events.log import read
from raytrain.report.audit import audit
from raytrain.rundir import RunDir
from raytrain.task import Task
from tests.laws.compare import RELATIVE, settings
from tests.support.local import Kill, LocalRun, Plot
from tests.support.tasks import Regression, WithAugmentation, WithEverything, WithMomentum

TASKS: dict[str, tuple[Task, str]] = {
    "adamw": (WithEverything(), "fp32"),
    "momentum, bf16": (WithMomentum(), "bf16"),
    "augmentation": (WithAugmentation(), "fp32"),
}
PLOTS: dict[str, tuple[str, int, list[Plot]]] = {
    "3 workers": ("adamw", 4, [Plot(3)]),
    "4 workers": ("momentum, bf16", 4, [Plot(4)]),
    "5 workers": ("adamw", 8, [Plot(5)]),
    "kill -9 and rejoin": ("adamw", 8, [Plot(3, kills=[Kill("w1", "after backward", 11)], hold=20)]),
    "random rows, kill and rejoin": ("augmentation", 4, [Plot(3, kills=[Kill("w1", "after backward", 11)], hold=20)]),
    "two resumes": ("momentum, bf16", 8, [Plot(2, abandon=5), Plot(3, abandon=11), Plot(1)]),
}
Result = tuple[dict[str, str], list[float], list[dict[str, float]]]
"""SHA-256 of the files of the last checkpoint, the losses, and the evaluations."""


def bitwise(num_logical: int, precision: str, **more: Any) -> RunConfig:
    """203 rows make steps of 16 and one of 11 with 4 logical workers, of 17 and one of 16 with 8."""
    batch = {4: 16, 8: 17}[num_logical]
    given = {"exactness": "bitwise", "logical_workers": num_logical, "workers": (1, num_logical), "epochs": 2}
    more = {"precision": precision, "checkpoint_every": 3, "clip_norm": 3.0, "global_batch": batch} | more
    return settings(**given | more)


def result(run_dir: RunDir, losses: dict[int, Any]) -> Result:
    newest = CheckpointStore(run_dir).newest_verified()
    assert newest is not None
    assert newest.step == len(losses)
    evaluations = [event.metrics for event in read(run_dir) if isinstance(event, EvaluationDone)]
    digests = {name: entry.sha256 for name, entry in newest.manifest.files.items()}
    return digests, [record.loss for record in losses.values()], evaluations


@pytest.fixture(scope="module")
def of_one_worker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of an uninterrupted run of one worker."""

    @cache
    def run(kind: str, num_logical: int) -> Result:
        task, precision = TASKS[kind]
        one = LocalRun(task, bitwise(num_logical, precision), tmp_path_factory.mktemp("one"), Plot(1))
        losses = one.run()
        return result(one.run_dir, losses)

    return run


@pytest.mark.timeout(60)
@pytest.mark.parametrize("plot", PLOTS)
def test_p3_checkpoints_losses_and_metrics_equal_those_of_one_worker_bit_for_bit(
    plot: str, tmp_path: Path, of_one_worker: Any
) -> None:
    kind, num_logical, plots = PLOTS[plot]
    task, precision = TASKS[kind]
    for part in plots:
        run = LocalRun(task, bitwise(num_logical, precision), tmp_path, part)
        losses = run.run()
    digests, curve, evaluations = result(run.run_dir, losses)
    expected, expected_curve, expected_evaluations = of_one_worker(kind, num_logical)
    assert curve == expected_curve
    assert evaluations[-1] == expected_evaluations[-1]
    assert digests == expected
    assert audit(run.run_dir).passed


@pytest.mark.timeout(60)
def test_p3_a_short_last_step_that_leaves_workers_without_rows_changes_no_bit(tmp_path: Path) -> None:
    results = []
    for number in (1, 5):
        config = bitwise(8, "fp32", global_batch=100, name=f"run{number}")
        run = LocalRun(Regression(), config, tmp_path, Plot(number))
        losses = run.run()
        results.append(result(run.run_dir, losses))
    assert results[0] == results[1]
    assert [record.rows for record in losses.values()] == [100, 100, 3] * 2


@pytest.mark.timeout(60)
def test_p3_the_exact_sums_are_those_of_default_mode_up_to_rounding(tmp_path: Path, of_one_worker: Any) -> None:
    run = LocalRun(WithEverything(), bitwise(4, "fp32", exactness="default"), tmp_path, Plot(2))
    losses = run.run()
    _, expected, _ = of_one_worker("adamw", 4)
    np.testing.assert_allclose([record.loss for record in losses.values()], expected, rtol=RELATIVE)


class Unsorted(Regression):
    """Uses an operator that has no deterministic kernel."""

    def loss(self, model: Any, batch: Any) -> Any:
        shuffled = batch["x"].clone().put_(batch["row"] % 12, batch["x"][:, 0])
        return (model(shuffled) - batch["y"]).pow(2).sum(1)


@pytest.mark.timeout(60)
def test_an_operator_without_a_deterministic_kernel_is_refused_before_the_first_step(tmp_path: Path) -> None:
    run = LocalRun(Unsorted(), bitwise(4, "fp32"), tmp_path, Plot(2))
    with pytest.raises(ConfigError, match=r"put_ has none on this device"):
        run.run()
    assert not list(read(run.run_dir)) or not any(event.kind == "steps_done" for event in read(run.run_dir))
