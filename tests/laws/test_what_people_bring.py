"""P3, P4: the models and habits that people have give the result of one plain process, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raytrain.events.kinds import EvaluationDone
from raytrain.events.log import read
from tests.laws.compare import assert_close, assert_same, final_weights, settings, train_by_hand
from tests.support.local import Kill, Plot
from tests.support.models import KEPT, ONLY_DEFAULT, NineRows
from tests.support.pool import PooledRun

RELATIVE = 1e-5
"""Rounding grows where small gradients meet momentum."""
PLOTS = {
    "1": Plot(1),
    "3": Plot(3),
    "2, a loss, 2": Plot(2, kills=[Kill("w1", "after backward", 5)], hold=9),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", KEPT)
def test_the_result_is_that_of_a_plain_loop_for_any_workers(case: str, tmp_path: Path) -> None:
    task, more = KEPT[case]
    config = settings(epochs=1, **more)
    expected = train_by_hand(task, config)
    for name, plot in PLOTS.items():
        run = PooledRun(task, config, tmp_path / name, plot)
        steps = run.run()
        assert_same(run.run_dir, steps, expected, RELATIVE)
        if config.ema_decay:
            assert_close(final_weights(run.run_dir, "ema.safetensors"), expected.average)
            assert evaluated(run)["valid/ema/loss"] == pytest.approx(loss_with(task, expected.average), rel=1e-5)
            assert evaluated(run)["valid/loss"] == pytest.approx(loss_with(task, expected.model), rel=1e-5)


@pytest.mark.timeout(60)
def test_a_worker_without_rows_in_the_second_step_is_not_taken_for_lost(tmp_path: Path) -> None:
    config = settings(epochs=2, global_batch=8, logical_workers=2, workers=(1, 2), collective_timeout_s=3.0)
    run = PooledRun(NineRows(), config, tmp_path, Plot(2))
    one = PooledRun(NineRows(), config, tmp_path / "one", Plot(1))
    losses = [[record.loss for record in steps.values()] for steps in (run.run(), one.run())]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(run.generations) == 1


def evaluated(run: PooledRun) -> dict[str, float]:
    """The last evaluation."""
    return [event.metrics for event in read(run.run_dir) if isinstance(event, EvaluationDone)][-1]


def loss_with(task: Any, weights: dict[str, torch.Tensor]) -> float:
    """The mean loss of the validation rows."""
    model, source = task.model().eval(), task.data()["valid"]
    model.load_state_dict(weights, strict=False)
    batch = {name: torch.from_numpy(column) for name, column in source.take(np.arange(source.num_rows)).items()}
    return float(task.loss(model, batch).mean().detach())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", KEPT.keys() - ONLY_DEFAULT)
def test_bitwise_the_result_is_that_of_one_worker_for_any_workers(case: str, tmp_path: Path) -> None:
    task, more = KEPT[case]
    config = settings(epochs=1, exactness="bitwise", **more)
    results: list[Any] = []
    for name, plot in PLOTS.items():
        run = PooledRun(task, config, tmp_path / name, plot)
        losses = [record.loss for record in run.run().values()]
        results.append((losses, {key: value.tolist() for key, value in final_weights(run.run_dir).items()}))
    assert results[1] == results[0]
    assert results[2] == results[0]
