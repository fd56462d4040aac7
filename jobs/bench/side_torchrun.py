"""The benchmarks' workload as a plain DistributedDataParallel loop, to be started by torchrun; `step.py` does.

Trains on the rows of raytrain's plan, in its order and from its initial weights, so that the losses can be compared. The
rows are taken from tensors in memory, which is quicker than a DataLoader.
"""

from __future__ import annotations

import argparse
import json
import os

import numpy as np
import torch
import torch.distributed as dist
import workload
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from raytrain.plan import Plan, logical_workers_of
from raytrain.worker.hooks import seed_everything


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log-dir", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--logical", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses = train(arguments.log_dir, arguments.steps, arguments.logical)
    dist.all_reduce(losses)
    if dist.get_rank() == 0:
        with open(os.path.join(arguments.log_dir, "losses.json"), "w") as file:
            json.dump((losses / dist.get_world_size()).tolist(), file)
    dist.barrier()
    os._exit(0)  # all is written; taking gloo's threads down now and then aborts the process (torch 2.13)


def train(log_dir: str, num_steps: int, num_logical: int) -> torch.Tensor:
    """The mean loss of this rank's rows in each step, shape [num_steps]; all ranks have equally many rows."""
    columns = {name: torch.from_numpy(values) for name, values in workload.make_columns().items()}
    plan = Plan(workload.ROWS, None, workload.GLOBAL_BATCH, num_logical)
    held = logical_workers_of(dist.get_rank(), dist.get_world_size(), num_logical)
    seed_everything(0)
    model = DistributedDataParallel(workload.build_model())
    optimizer = workload.build_optimizer(model)
    clock = workload.build_clock(optimizer, log_dir)
    losses = []
    for step in range(num_steps):
        rows = torch.from_numpy(np.concatenate([plan.row_ids(step, logical) for logical in held]))
        loss = F.cross_entropy(model(columns["features"][rows]), columns["label"][rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step()
        losses.append(loss.detach())
    return torch.stack(losses)


if __name__ == "__main__":
    main()
