"""Searches for good hyperparameters of digits.py: 12 trials, of which the worse ones are stopped early.

The trials share the workers of the cluster, and each takes more of them when others end. Start it again after anything
that stopped it, and it goes on where it was.

    python jobs/digits_sweep.py
    ray job submit --working-dir . -- python jobs/digits_sweep.py

A sweep needs no second file: python jobs/digits.py --sweep.space.lr log:1e-3:1 --sweep.trials 12
"""

from __future__ import annotations

import sys

from digits import Digits
from ray import tune

import raytrain


def main() -> int:
    sweep = raytrain.Sweep(
        Digits,
        space={
            "lr": tune.loguniform(1e-3, 1),
            "hidden": tune.choice([32, 64, 128]),
            "run.global_batch": tune.choice([32, 64]),
        },
        config=raytrain.RunConfig(name="digits-sweep", epochs=10, workers=(1, 2), best="max:valid/accuracy"),
        trials=12,
        scheduler="asha",
    )
    result = raytrain.show(sweep)
    print(result.table.drop(columns="directory").to_string(index=False))
    if best := result.best:
        print(f"best: {best.name}, accuracy {best.value:.3f} after {best.step} steps, with {dict(best.values)}")
        print(f"its weights: {best.checkpoint}")
    return 128 + result.stopped_by if result.stopped_by else int(result.num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
