"""P2, P3, P5: what evaluations decide is the same for any workers, and an evaluation that fails costs no checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from raytrain.checkpoint.store import CheckpointStore
from raytrain.errors import TaskError
from raytrain.events.curve import StepRecord
from raytrain.events.kinds import EvaluationDone
from raytrain.events.log import read
from tests.laws.compare import final_weights, settings
from tests.support.local import Kill, LocalRun, Plot
from tests.support.tasks import BrokenMetric, WithPlateau

OFTEN = {"eval_every": 6, "checkpoint_every": 6, "epochs": 2}
DEATHS = [Kill("w0", "before evaluation", 12), Kill("w1", "after evaluation", 18)]


def trained(path: Path, *plots: Plot) -> tuple[dict[int, StepRecord], LocalRun]:
    for plot in plots:
        run = LocalRun(WithPlateau(), settings(**OFTEN), path, plot)
        steps = run.run()
    return steps, run


@pytest.mark.timeout(120)
def test_r3_a_plateau_schedule_is_that_of_one_process_over_kills_and_a_resume(tmp_path: Path) -> None:
    alone, one = trained(tmp_path / "alone", Plot(1))
    rates = [record.learning_rate for record in alone.values()]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=WithPlateau().lr / 10)
    plain, expected = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05), []
    evaluations = {each.step: each.metrics["valid/loss"] for each in read(one.run_dir) if isinstance(each, EvaluationDone)}
    for step in range(len(rates)):
        if step in evaluations:
            plain.step(evaluations[step])
        expected.append(optimizer.param_groups[0]["lr"])
    assert rates == expected
    assert len(set(rates)) > 1, "it was reduced"
    for name, plots in {"kills": [Plot(3, kills=DEATHS)], "resume": [Plot(2, abandon=13), Plot(1)]}.items():
        steps, run = trained(tmp_path / name, *plots)
        assert [record.learning_rate for record in steps.values()] == rates
        np.testing.assert_allclose([record.loss for record in steps.values()], [r.loss for r in alone.values()], rtol=1e-6)
        for key, weights in final_weights(one.run_dir).items():
            torch.testing.assert_close(final_weights(run.run_dir)[key], weights, rtol=1e-5, atol=1e-7)
        best = {each.step: each.manifest.metrics for each in CheckpointStore(run.run_dir).list()}
        assert min(evaluations, key=lambda step: evaluations[step]) in best
        assert all(metrics["valid/loss"] == pytest.approx(evaluations[step], rel=1e-5) for step, metrics in best.items())


@pytest.mark.timeout(60)
def test_r7_r16_an_evaluation_that_fails_on_one_rank_costs_no_checkpoint(tmp_path: Path) -> None:
    task = BrokenMetric(limit=0.3)
    run = LocalRun(task, settings(**OFTEN), tmp_path, Plot(3))
    with pytest.raises(TaskError, match="no such class"):
        run.run()
    newest = CheckpointStore(run.run_dir).newest_verified()
    assert newest is not None
    assert (newest.step, newest.manifest.metrics) == (6, {})
    mended = LocalRun(BrokenMetric(limit=9.0), settings(**OFTEN), tmp_path, Plot(1))
    mended.run()
    evaluations = [event.step for event in read(mended.run_dir) if isinstance(event, EvaluationDone)]
    assert evaluations == [6, 12, 18, 24, 26]
