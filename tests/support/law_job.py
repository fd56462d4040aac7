"""A job script for tests that stop or kill the driver: trains `Gated` with the settings of the laws.

With `--fails N` its loss raises in call N of a worker in training; it prints what its worker was given.
"""

import os
import time
import warnings
from typing import Any

import torch
from torch import nn

import raytrain
from tests.laws.compare import LAW_SETTINGS
from tests.support.tasks import Gated

CALLS = [0]  # of loss in this process while the model trains; the first two are before the first step


class Job(Gated):
    """Fits a net to made data."""

    fails: int = -1

    def model(self) -> nn.Module:
        print("threads", torch.get_num_threads(), os.environ.get("NCCL_DEBUG"), os.environ.get("TOKEN"))
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if not model.training:
            return super().loss(model, batch)
        if CALLS[0] == self.fails:
            print("about to fail", flush=True)
            warnings.warn("this is a warning", stacklevel=1)
            print(f"raised at {time.time()}")
            raise KeyError("boom")
        CALLS[0] += 1
        return super().loss(model, batch)


if __name__ == "__main__":
    raytrain.main(Job, **LAW_SETTINGS)
