"""Tells circles, squares and triangles apart: PNG files in a folder per class, with augmentation.

The pictures are drawn before the first run and found there by later ones. Shows: files that are decoded while the workers
train, random flips that are the same for any number of workers. All pictures that it never trained on are right, or nearly
all, after some seconds of training on two CPUs.

    pip install 'raytrain[images]'
    python jobs/images.py
    python jobs/images.py --flip 0 --run.workers 1:4 --run.name without-flips
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from pydantic import Field
from torch import nn
from torch.nn import functional as F

import raytrain

SIDE = 32  # pixels
CLASSES = {"circle": 0, "square": 4, "triangle": 3}  # number of corners
TRAIN_IMAGES, VALID_IMAGES = 300, 100  # of each class


class Shapes(raytrain.Task):
    """Circles, squares and triangles, 32x32 pixels."""

    width: int = Field(default=16, gt=0)
    """Channels of the first layer; each later one has twice as many."""
    lr: float = Field(default=3e-3, gt=0)
    """Learning rate."""
    flip: float = Field(default=0.5, ge=0, le=1)
    """Share of the pictures that are mirrored in training, each way."""
    cache: str = "./runs/images-data"
    """Directory for the pictures; it must be on storage that all nodes of a cluster share."""

    def data(self):
        directory = Path(self.cache).expanduser().absolute()
        if not directory.exists():
            draw_all(directory)
        return {name: raytrain.images(directory / name, size=(SIDE, SIDE)) for name in ("train", "valid")}

    def model(self):
        def block(inputs: int, outputs: int) -> nn.Module:
            convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1)
            return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))

        widths = [3, *(self.width * 2**i for i in range(3))]
        blocks = [block(*pair) for pair in itertools.pairwise(widths)]
        return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(widths[-1] * (SIDE // 8) ** 2, len(CLASSES)))

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def loss(self, model, batch):
        images = scaled(batch)
        if model.training:  # also evaluated on `valid`, where nothing is random
            images = flipped(images, self.flip)
        return F.cross_entropy(model(images), batch["label"], reduction="none")

    def metrics(self, model, batch):
        return {"accuracy": (model(scaled(batch)).argmax(1) == batch["label"]).float()}


def scaled(batch):
    """Pixels from -1 to 1: [rows, 3, height, width]."""
    return batch["image"].float() / 127.5 - 1


def flipped(images, share):
    """Mirrors a share of the images in each direction; raytrain seeds the generator by step and logical worker."""
    for side in (2, 3):
        chosen = torch.rand(len(images), 1, 1, 1) < share
        images = torch.where(chosen.to(images.device), images.flip(side), images)
    return images


def draw_all(directory: Path) -> None:
    """Writes the files of both splits; the directory appears when it is complete, or not at all."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    generator = np.random.default_rng(0)
    try:
        unfinished.chmod(0o755)
        for split, count in (("train", TRAIN_IMAGES), ("valid", VALID_IMAGES)):
            for name, corners in CLASSES.items():
                (unfinished / split / name).mkdir(parents=True)
                for number in range(count):
                    draw(generator, corners).save(unfinished / split / name / f"{number:04}.png")
        unfinished.rename(directory)
    except OSError:
        if not directory.exists():  # else another job wrote the same meanwhile
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def draw(generator: np.random.Generator, corners: int) -> Image.Image:
    """A shape with so many corners, 0 for a circle: light, of any place, size and rotation, on dark noise."""
    image = Image.fromarray(generator.integers(0, 110, (SIDE, SIDE, 3), np.uint8))
    color = tuple(generator.integers(120, 256, 3).tolist())
    x, y, radius, rotation = generator.uniform((12, 12, 8, 0), (20, 20, 12, 360))
    if corners:
        ImageDraw.Draw(image).regular_polygon((x, y, radius), corners, rotation, fill=color)
    else:
        ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
    return image


if __name__ == "__main__":
    raytrain.main(Shapes, epochs=10, global_batch=30, workers=(1, 2), best="max:valid/accuracy")
