"""The benchmarks' workload on Ray Train alone, written as its documentation recommends; the other files here start it.

Elastic (1 or 2 workers), a checkpoint of model, optimizer and scheduler every few steps, restored from
`get_checkpoint()`, failures retried by `FailureConfig`. As in raytrain the global batch is kept when the workers change.
With `--just-in-time` it also saves once as soon as it sees the notice of a preemption, and goes on until the node is gone.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import workload

ASK_EVERY = 10
"""Steps between two questions about preemptions: each is a barrier through an actor."""


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
    model = prepare_model(workload.build_model(config["width"]))
    bare = getattr(model, "module", model)
    optimizer = workload.build_optimizer(model)
    clock = workload.build_clock(optimizer, config["log_dir"])
    parts = {"model": bare, "optimizer": optimizer, "scheduler": clock}
    step, warned = restore(parts), False
    while step < config["steps"]:
        batch = np.arange(step * workload.GLOBAL_BATCH, (step + 1) * workload.GLOBAL_BATCH) % workload.ROWS
        rows = torch.from_numpy(np.array_split(batch, world)[rank])
        loss = F.cross_entropy(model(columns["features"][rows]), columns["label"][rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step()
        step += 1
        in_time = config["just_in_time"] and not warned and step % ASK_EVERY == 0 and is_announced()
        warned = warned or in_time
        if in_time or step % config["checkpoint_every"] == 0:
            report(parts, step, loss.item(), saves=rank == 0)


def is_announced() -> bool:
    """Whether the node of a worker is about to go; all ranks get the same answer, that of rank 0."""
    import ray.train

    return ray.train.get_preemption_info() is not None


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
    parser.add_argument("--checkpoint-every", type=int, default=workload.CHECKPOINT_EVERY)
    parser.add_argument("--width", type=int, default=workload.WIDTH)
    parser.add_argument("--just-in-time", action="store_true")
    arguments = parser.parse_args()
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    address = os.environ.get("RAY_ADDRESS")
    ray.init(address=address) if address else ray.init(address="local", include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config=vars(arguments),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=(1, 2)),
        run_config=RunConfig(
            name="bench",
            storage_path=arguments.storage,
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main()
