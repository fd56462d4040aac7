"""How does a piece of rows become what the training sees? By the user's transform, which this module guards and seeds.

A transform's random numbers follow from the plan's seed and the place of the piece, so they are the same wherever and
whenever it runs. It uses the generators of its process, hence it runs in the training thread or in a Ray Data process,
never in a thread beside the training, which draws from the same ones.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping

import numpy as np

from raytrain.data.columns import to_array
from raytrain.data.reading import Block, Piece, Transform
from raytrain.data.source import Columns
from raytrain.errors import DataError


def transformed(transform: Transform | None, piece: Piece) -> Block:
    """The wanted rows of a piece, transformed. Leaves the generators of numpy and Python (and of PyTorch, where it is
    imported) as the transform left them.

    Raises:
        DataError: the transform returned something else than columns of as many rows.
        Exception: whatever the transform raised.
    """
    block = piece.block
    if transform is not None:
        seed_generators(piece.seed)
        block = Block(block.logical, block.place, block.rows, _checked(transform(block.columns), len(block.rows)))
    return block if piece.num_wanted == len(block.rows) else block.part(piece.wanted)


def seed_generators(parts: tuple[int, ...]) -> None:
    """Seeds the generators that this process has, all from the same parts."""
    seed = int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
    np.random.seed(seed % 2**32)
    random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def _checked(made: object, num_rows: int) -> Columns:
    if not isinstance(made, Mapping):
        rule = "returns numpy columns by name"
        raise DataError("transform", f"returned {type(made).__name__}", rule, "return the dictionary of columns")
    columns = {name: to_array("transform", name, values) for name, values in made.items()}
    for name, values in columns.items():
        if len(values) != num_rows:
            rule = f"keeps the number of rows: it was given {num_rows}"
            fix = "return one entry per row; leave rows out where the data are made"
            raise DataError(f"transform, column {name!r}", f"{len(values)} rows", rule, fix)
    return columns
