"""A sweep as a job: three trials one after the other, of which the last one is stopped for being worse than those before."""

from __future__ import annotations

import sys

from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler

import raytrain
from tests.laws.compare import settings
from tests.support.tasks import Gated


def main(storage: str, gate: str) -> int:
    config = settings(
        name="sweep",
        storage=storage,
        workers=(1, 2),
        logical_workers=2,
        epochs=4,
        checkpoint_every=5,
        best="min:valid/mae",
    )
    sweep = raytrain.Sweep(
        Gated,
        {"lr": tune.grid_search([0.05, 0.0, 0.08])},
        config=config,
        fixed={"gate": gate},
        trials=1,
        concurrent=1,
        scheduler=AsyncHyperBandScheduler(time_attr="step", max_t=52, grace_period=13, reduction_factor=2),
    )
    result = sweep.fit()
    print(result.outcome, flush=True)
    result.table.drop(columns="directory").to_json(f"{storage}/table.json", orient="records")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
