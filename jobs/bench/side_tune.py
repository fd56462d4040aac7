"""The benchmarks' sweep on Ray Tune and Ray Train alone, written as their documentation recommends; `sweep.py` starts it.

A trial is a function that runs a `TorchTrainer` with a fixed number of workers; `TuneReportCallback` hands its reports on.
The functions take a resource of their own, so that they do not take CPUs from workers. Trains on the rows of raytrain's
plan, from its initial weights, so that the values of a trial can be compared; a checkpoint goes with each report.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile

import workload

DRIVERS = "TRIAL_DRIVER"
"""Resource of the head node: one for each trial at a time."""


def train(config):
    import numpy as np
    import ray.train
    import torch
    from ray.train.torch import prepare_model
    from torch.nn import functional as F

    from raytrain.plan import Plan, logical_workers_of
    from raytrain.worker.hooks import seed_everything

    torch.set_num_threads(1)
    seed_everything(0)
    train, valid = ({name: torch.from_numpy(v) for name, v in some.items()} for some in workload.make_trial_columns())
    context = ray.train.get_context()
    held = logical_workers_of(context.get_world_rank(), context.get_world_size(), workload.TRIAL_LOGICAL)
    plan = Plan(len(train["label"]), None, workload.TRIAL_BATCH, workload.TRIAL_LOGICAL)
    model = prepare_model(workload.build_trial_model())
    optimizer = workload.build_optimizer(model, config["lr"])
    clock = workload.build_clock(optimizer, config["log_dir"])
    for step in range(workload.TRIAL_EPOCHS * plan.steps_per_epoch):
        rows = torch.from_numpy(np.concatenate([plan.row_ids(step, logical) for logical in held]))
        workload.wait_for_device(len(rows))
        loss = F.cross_entropy(model(train["features"][rows]), train["label"][rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step()
        if (step + 1) % plan.steps_per_epoch == 0:
            with torch.no_grad():
                value = F.cross_entropy(model(valid["features"]), valid["label"]).item()
            parts = {"model": getattr(model, "module", model), "optimizer": optimizer, "scheduler": clock}
            report(parts, (step + 1) // plan.steps_per_epoch, value, saves=context.get_world_rank() == 0)


def report(parts, epoch: int, value: float, saves: bool) -> None:
    import ray.train
    import torch

    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if saves:
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "epoch": epoch}, os.path.join(directory, "state.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(directory)
        ray.train.report({"valid/loss": value, "epoch": epoch}, checkpoint=checkpoint)


def run_trial(config):
    """Runs in an actor of Tune."""
    import ray.tune
    from ray.train import CheckpointConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.tune.integration.ray_train import TuneReportCallback

    TorchTrainer(
        train,
        train_loop_config={"lr": config["lr"], "log_dir": str(workload.trial_directory(config["log_dir"], config["lr"]))},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=config["num_workers"], resources_per_worker={"CPU": workload.WORKER_CPUS}),
        run_config=RunConfig(
            name=f"trial-{ray.tune.get_context().get_trial_id()}",
            storage_path=config["storage"],
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            callbacks=[TuneReportCallback()],
        ),
    ).fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log-dir", required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--values", required=True, help="file that gets the values of each trial")
    parser.add_argument("--num-workers", type=int, required=True, help="workers of each trial")
    parser.add_argument("--all-workers", type=int, required=True, help="workers of all trials together")
    arguments = parser.parse_args()
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    ray.init(address=os.environ["RAY_ADDRESS"])
    fixed = {"num_workers": arguments.num_workers, "log_dir": arguments.log_dir, "storage": arguments.storage}
    results = tune.Tuner(
        tune.with_resources(run_trial, {"CPU": 0, DRIVERS: 1}),
        param_space={"lr": tune.grid_search(list(workload.TRIALS)), **fixed},
        tune_config=tune.TuneConfig(
            metric="valid/loss",
            mode="min",
            scheduler=ASHAScheduler(
                time_attr="epoch", max_t=workload.TRIAL_EPOCHS, grace_period=1, reduction_factor=workload.REDUCTION
            ),
            max_concurrent_trials=arguments.all_workers // arguments.num_workers,
        ),
        run_config=tune.RunConfig(name="bench", storage_path=arguments.storage),
    ).fit()
    values = {f"{result.config['lr']:g}": list(result.metrics_dataframe["valid/loss"]) for result in results}
    with open(arguments.values, "w") as file:
        json.dump(values, file)


if __name__ == "__main__":
    main()
