"""What do random numbers that the user's data code draws follow from?

`__getitem__` of a dataset and `transform` draw from the global generators of torch, numpy and Python. These are seeded
before each call, and in the end they are as they were before, since the training and the rest of the user's code draw
from the same ones. They belong to the process: no other thread may draw at that time. Imports PyTorch only when called.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

ROW = 0x726F77
"""Last of the numbers that seed a row, (seed, epoch, row, ROW), so that no other seed of a run is equal to them."""

SEEDED_GENERATORS = (
    "random numbers come from the generators of torch, numpy.random and random, which are seeded for the rows"
)
"""The rule that a generator of one's own breaks."""


def seed_generators(*parts: int) -> int:
    """Seeds the CPU's generators of torch, numpy and Python from integers; returns the number that they got."""
    import torch

    number = int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
    torch.default_generator.manual_seed(number)  # `torch.manual_seed` takes 1 ms where there is no GPU
    np.random.seed(number % 2**32)
    random.seed(number)
    return number


@contextmanager
def seeded_generators() -> Iterator[Callable[..., int]]:
    """Gives `seed_generators`; restores the generators' states at the end of the block."""
    import torch

    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield seed_generators
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
