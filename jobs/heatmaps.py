"""Finds the joints of stick figures: a small network predicts a heatmap for each of 17 joints.

Pictures and heatmaps are numpy files, made before the first run and found there by later ones: one .npy with all pictures,
one .npy of 209 kB for the heatmaps of each picture. Shows: files that are mapped or read row by row, never all of them; a
loss over pixels; a metric that is read off the heatmaps. The joints are found to a pixel after half a minute on two CPUs.

    python jobs/heatmaps.py
    python jobs/heatmaps.py --width 48 --run.epochs 30 --run.name wide
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from torch import nn

import raytrain

JOINTS, HEIGHT, WIDTH = 17, 64, 48
SIGMA = 2.0  # of a joint's Gaussian, in pixels
TRAIN_ROWS, VALID_ROWS = 320, 64
HEAD = [(12, 24), (10, 22), (10, 26), (11, 20), (11, 28)]  # nose, eyes and ears: row and column of a figure that stands
ARMS = [(19, 18), (19, 30), (27, 15), (27, 33), (34, 14), (34, 34)]  # shoulders, elbows, wrists
LEGS = [(35, 20), (35, 28), (45, 19), (45, 29), (55, 19), (55, 29)]  # hips, knees, ankles
STANDING = np.array([*HEAD, *ARMS, *LEGS])
TORSO = [(3, 5), (4, 6), (5, 6), (5, 11), (6, 12), (11, 12)]  # pairs of joints, in the order of COCO
LIMBS = np.array(
    [(0, 1), (0, 2), (1, 3), (2, 4), *TORSO, (5, 7), (7, 9), (6, 8), (8, 10), (11, 13), (13, 15), (12, 14), (14, 16)]
)


class Heatmaps(raytrain.Task):
    """Joints of stick figures, 64x48 pixels."""

    width: int = Field(default=32, gt=0)
    """Channels of the layers."""
    lr: float = Field(default=5e-3, gt=0)
    """Highest learning rate; falls to zero along a cosine."""
    cache: str = "./runs/heatmaps-data"
    """Directory for the numpy files, 84 MB; it must be on storage that all nodes of a cluster share."""

    def data(self):
        directory = Path(self.cache).expanduser().absolute()
        if not directory.exists():
            write_all(directory)
        return {name: self.split(directory / name) for name in ("train", "valid")}

    def split(self, directory: Path):
        return raytrain.numpy(picture=directory / "pictures.npy", heatmap=directory / "heatmaps")

    def model(self):
        def block(inputs: int, stride: int = 1) -> list[nn.Module]:
            layer = nn.Conv2d(inputs, self.width, kernel_size=5, padding=2, stride=stride)
            return [layer, nn.BatchNorm2d(self.width), nn.ReLU()]

        return nn.Sequential(
            *block(1, stride=2),  # [rows, 1, 64, 48] -> [rows, width, 32, 24]
            *block(self.width, stride=2),  # -> [rows, width, 16, 12]
            *block(self.width),
            *block(self.width),
            nn.Conv2d(self.width, JOINTS * 16, kernel_size=1),
            nn.PixelShuffle(4),  # [rows, 17 * 16, 16, 12] -> [rows, 17, 64, 48]
        )

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def scheduler(self, optimizer, num_steps):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)

    def loss(self, model, batch):
        scores, heatmaps = predicted(model, batch).flatten(2), batch["heatmap"].flatten(2)  # [rows, 17, 64 * 48]
        shares = heatmaps / heatmaps.sum(2, keepdim=True)  # cross entropy learns where; a squared error first learns zeros
        return -(shares * scores.log_softmax(2)).sum(2).mean(1)

    def metrics(self, model, batch):
        found, wanted = (peaks(heatmaps) for heatmaps in (predicted(model, batch), batch["heatmap"]))
        return {"pixels": (found - wanted).norm(dim=2).mean(1)}


def predicted(model, batch):
    """Pictures [rows, 64, 48] -> heatmaps [rows, 17, 64, 48]."""
    return model(batch["picture"].float().unsqueeze(1) / 127.5 - 1)


def peaks(heatmaps):
    """Row and column of the highest pixel of each heatmap: [rows, 17, 64, 48] -> [rows, 17, 2]."""
    highest = heatmaps.flatten(2).argmax(2)
    return torch.stack([highest // WIDTH, highest % WIDTH], dim=2).float()


def write_all(directory: Path) -> None:
    """Writes the files of both splits; the directory appears when it is complete, or not at all."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    generator = np.random.default_rng(0)
    try:
        unfinished.chmod(0o755)
        for split, rows in (("train", TRAIN_ROWS), ("valid", VALID_ROWS)):
            (unfinished / split / "heatmaps").mkdir(parents=True)
            poses = [pose(generator) for _ in range(rows)]
            np.save(unfinished / split / "pictures.npy", np.stack([picture(generator, joints) for joints in poses]))
            for row, joints in enumerate(poses):  # padded, so that the order of names is that of the pictures
                np.save(unfinished / split / "heatmaps" / f"{row:05}.npy", gaussians(joints))
        unfinished.rename(directory)
    except OSError:
        if not directory.exists():  # else another job wrote the same meanwhile
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def pose(generator: np.random.Generator) -> np.ndarray:
    """Row and column of each joint of a figure of any place and size, [17, 2]."""
    middle, shift = STANDING.mean(0), generator.uniform(-5, 5, 2)
    joints = (STANDING - middle) * generator.uniform(0.8, 1.05) + middle + shift
    return (joints + generator.normal(0, 1, joints.shape)).clip(0, (HEIGHT - 1, WIDTH - 1))


def picture(generator: np.random.Generator, joints: np.ndarray) -> np.ndarray:
    """Limbs as white lines on noise, uint8 [64, 48]."""
    pixels = generator.integers(0, 90, (HEIGHT, WIDTH), np.uint8)
    first, second = joints[LIMBS].transpose(1, 0, 2)
    row, column = np.linspace(first, second, 40).round().astype(int).reshape(-1, 2).T
    pixels[row, column] = 255
    return pixels


def gaussians(joints: np.ndarray) -> np.ndarray:
    """A heatmap for each joint, 1 at its pixel, float32 [17, 64, 48]."""
    row, column = (joints[:, axis, None, None] for axis in (0, 1))
    squares = (np.arange(HEIGHT)[:, None] - row) ** 2 + (np.arange(WIDTH) - column) ** 2
    return np.exp(-squares / (2 * SIGMA**2)).astype(np.float32)


if __name__ == "__main__":
    raytrain.main(Heatmaps, epochs=10, global_batch=16, workers=(1, 2), best="min:valid/pixels")
