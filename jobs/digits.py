"""Classifies scikit-learn's handwritten digits: 1,797 pictures of 8x8 pixels that come with the package.

The smallest whole job: data in memory, one loss value per row, one metric. About 99 % of the pictures that it never
trained on are right at the end, after some seconds of training on two CPUs.

    python jobs/digits.py
    python jobs/digits.py --hidden 256 --run.workers 1:4 --run.name wide
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import raytrain


class Digits(raytrain.Task):
    """Handwritten digits, 8x8 pixels."""

    hidden: int = 128
    """Width of the layer before the last."""
    lr: float = 0.1
    """Learning rate."""

    def data(self):
        from sklearn.datasets import load_digits  # here, since only the driver needs it: workers start sooner

        pixels, label = load_digits(return_X_y=True)
        pixels = (pixels / 16).astype(np.float32)
        is_valid = np.arange(len(label)) % 5 == 0
        return {
            "train": raytrain.arrays(pixels=pixels[~is_valid], label=label[~is_valid]),
            "valid": raytrain.arrays(pixels=pixels[is_valid], label=label[is_valid]),
        }

    def model(self):
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),  # [rows, 64] -> [rows, 1, 8, 8]
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),  # [rows, 16, 4, 4] -> [rows, 256]
            nn.Linear(256, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, 10),
        )

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["pixels"]), batch["label"], reduction="none")

    def metrics(self, model, batch):
        return {"accuracy": (model(batch["pixels"]).argmax(1) == batch["label"]).float()}


if __name__ == "__main__":
    raytrain.main(Digits, epochs=20, global_batch=64, workers=(1, 2), best="max:valid/accuracy")
