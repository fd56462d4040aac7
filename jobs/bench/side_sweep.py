"""The benchmarks' sweep on raytrain; `sweep.py` starts it."""

from __future__ import annotations

import argparse
import json

import workload
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch.nn import functional as F

import raytrain


class Trial(raytrain.Task):
    """One learning rate."""

    lr: float
    """The learning rate."""
    log_dir: str
    """Directory that gets the times of the steps of all trials."""

    def data(self):
        train, valid = workload.make_trial_columns()
        return {"train": raytrain.arrays(**train), "valid": raytrain.arrays(**valid)}

    def model(self):
        return workload.build_trial_model()

    def optimizer(self, model):
        return workload.build_optimizer(model, self.lr)

    def scheduler(self, optimizer, num_steps):
        return workload.build_clock(optimizer, str(workload.trial_directory(self.log_dir, self.lr)))

    def loss(self, model, batch):
        if model.training:
            workload.wait_for_device(len(batch["label"]))
        return F.cross_entropy(model(batch["features"]), batch["label"], reduction="none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log-dir", required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--values", required=True, help="file that gets the values of each trial")
    parser.add_argument("--all-workers", type=int, required=True, help="workers of all trials together")
    arguments = parser.parse_args()
    sweep = raytrain.Sweep(
        Trial,
        {"lr": tune.grid_search(list(workload.TRIALS))},
        config=raytrain.RunConfig(
            name="bench",
            storage=arguments.storage,
            workers=(1, arguments.all_workers),
            logical_workers=workload.TRIAL_LOGICAL,
            cpus_per_worker=workload.WORKER_CPUS,
            threads_per_worker=1,
            global_batch=workload.TRIAL_BATCH,
            epochs=workload.TRIAL_EPOCHS,
        ),
        fixed={"log_dir": arguments.log_dir},
        scheduler=ASHAScheduler(
            time_attr="epoch", max_t=workload.TRIAL_EPOCHS, grace_period=1, reduction_factor=workload.REDUCTION
        ),
        trials=1,
        workers=arguments.all_workers,
    )
    result = sweep.fit()
    values = {f"{trial.values['lr']:g}": [value for _, value in trial.curve] for trial in result.view.trials}
    with open(arguments.values, "w") as file:
        json.dump(values, file)


if __name__ == "__main__":
    main()
