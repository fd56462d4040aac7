"""Which rows did all ranks together train on in a step? Gathered before the commit, so that every rank can tell it."""

from __future__ import annotations

import torch

from raytrain.events.rows import pack
from raytrain.plan.order import Plan
from raytrain.worker.group import Group
from raytrain.worker.step import Shares


def gather_row_ids(group: Group, plan: Plan, step: int, shares: Shares) -> str:
    """The row numbers that came with the data of all ranks, packed.

    Each logical worker has its own places in a vector of the step's rows, so that rows of two ranks at the same place add
    up to a wrong number instead of hiding each other.
    """
    places = torch.zeros(plan.rows_in_step(step), dtype=torch.int64)
    for logical, micros in shares.items():
        place = sum(plan.share(step, earlier) for earlier in range(logical))
        for micro in micros:
            places[place : place + len(micro.rows)] += torch.from_numpy(micro.rows.copy())
            place += len(micro.rows)
    return pack(group.sum(places.to(group.device)).cpu().numpy())
