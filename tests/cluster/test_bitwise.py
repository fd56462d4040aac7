"""P3 to the last bit on real Ray: what so many workers come to is what one process without Ray comes to."""

from __future__ import annotations

from pathlib import Path

import pytest

import raytrain
from raytrain.events.curve import curve
from raytrain.events.log import read
from raytrain.rundir import RunDir
from tests.laws.test_bitwise import TASKS, bitwise, result
from tests.support.local import LocalRun, Plot


@pytest.mark.timeout(150)
@pytest.mark.usefixtures("small_ray")
@pytest.mark.parametrize(("kind", "num_logical", "num_workers"), [("adamw", 4, 3), ("momentum, bf16", 8, 5)])
def test_p3_checkpoints_losses_and_metrics_on_ray_are_those_of_one_process(
    kind: str, num_logical: int, num_workers: int, tmp_path: Path
) -> None:
    task, precision = TASKS[kind]
    place = {"storage": str(tmp_path / "ray"), "workers": (num_workers, num_workers), "cpus_per_worker": 0.25}
    config = bitwise(num_logical, precision, **place)
    raytrain.Trainer(task, config).fit()
    run_dir = RunDir.at(str(tmp_path / "ray"), config.name)

    one = LocalRun(task, bitwise(num_logical, precision), tmp_path / "plain", Plot(1))
    losses = one.run()
    assert result(run_dir, curve(read(run_dir))) == result(one.run_dir, losses)
