"""A sweep as a job: one trial after the other, of which the last one is stopped for being worse than those before."""

from __future__ import annotations

import sys

from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler

import raytrain
from tests.laws.compare import settings
from tests.support.tasks import Gated

RATES = [0.0, 0.01, 0.2]


def make_task(lr: float, gate: str) -> Gated:
    """Only the second trial is slow while the gate exists."""
    return Gated(lr=lr, gate=gate if lr == RATES[1] else "")


def main(storage: str, gate: str) -> int:
    sweep = raytrain.Sweep(
        make_task,
        {"lr": tune.grid_search(RATES)},
        config=settings(name="sweep", storage=storage, workers=1, checkpoint_every=5, best="min:valid/mae"),
        fixed={"gate": gate},
        trials=1,
        concurrent=1,
        scheduler=AsyncHyperBandScheduler(time_attr="step", max_t=39, grace_period=13, reduction_factor=2),
    )
    result = sweep.fit()
    result.table.drop(columns="directory").to_json(f"{storage}/table.json", orient="records")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
