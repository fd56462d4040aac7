"""The benchmarks' workload on Ray Train alone, written as its documentation recommends; `recovery.py` starts it.

Elastic (1 or 2 workers), a checkpoint of model, optimizer and scheduler every few steps, restored from
`get_checkpoint()`, failures retried by `FailureConfig`. As in raytrain the global batch is kept when the workers change.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import workload


def train(config):
    import numpy as np
    import ray.train
    import torch
    from ray.train.torch import prepare_model
    from torch.nn import functional as F

    torch.set_num_threads(1)
    torch.manual_seed(0)
    columns = {name: torch.from_numpy(values) for name, values in workload.make_columns().items()}
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    model = prepare_model(workload.build_model())
    bare = getattr(model, "module", model)
    optimizer = workload.build_optimizer(model)
    clock = workload.build_clock(optimizer, config["log_dir"])
    parts = {"model": bare, "optimizer": optimizer, "scheduler": clock}
    step = restore(parts)
    while step < config["steps"]:
        batch = np.arange(step * workload.GLOBAL_BATCH, (step + 1) * workload.GLOBAL_BATCH) % workload.ROWS
        rows = torch.from_numpy(np.array_split(batch, world)[rank])
        loss = F.cross_entropy(model(columns["features"][rows]), columns["label"][rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step()
        step += 1
        if step % workload.CHECKPOINT_EVERY == 0:
            report(parts, step, loss.item(), saves=rank == 0)


def restore(parts) -> int:
    """Puts the newest checkpoint into the parts; returns its step, 0 if there is none."""
    import ray.train
    import torch

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        state = torch.load(os.path.join(directory, "state.pt"), weights_only=False)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return state["step"]


def report(parts, step: int, loss: float, saves: bool) -> None:
    import ray.train
    import torch

    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if saves:
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "step": step}, os.path.join(directory, "state.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(directory)
        ray.train.report({"loss": loss, "step": step}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log-dir", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--storage", required=True)
    arguments = parser.parse_args()
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(address="local", include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config={"log_dir": arguments.log_dir, "steps": arguments.steps},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=(1, 2)),
        run_config=RunConfig(
            name="bench",
            storage_path=arguments.storage,
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main()
