"""The benchmarks' workload as a raytrain job; the other files here start it."""

from __future__ import annotations

import workload
from torch.nn import functional as F

import raytrain


class Bench(raytrain.Task):
    """The benchmarks' workload."""

    log_dir: str
    """Directory that gets the times of the steps."""
    width: int = workload.WIDTH
    """Units of each hidden layer."""

    def data(self):
        return {"train": raytrain.arrays(**workload.make_columns())}

    def model(self):
        return workload.build_model(self.width)

    def optimizer(self, model):
        return workload.build_optimizer(model)

    def scheduler(self, optimizer, num_steps):
        return workload.build_clock(optimizer, self.log_dir)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["features"]), batch["label"], reduction="none")


if __name__ == "__main__":
    raytrain.main(Bench, global_batch=workload.GLOBAL_BATCH, logical_workers=workload.NUM_LOGICAL, threads_per_worker=1)
