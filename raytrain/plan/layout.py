"""Which worker holds which logical worker? Consecutive ones, as equally as possible."""

from __future__ import annotations


def held_by(rank: int, num_ranks: int, num_logical: int) -> range:
    """The logical workers of a rank; at least one each, since there are never more ranks than logical workers."""
    return range(-(-rank * num_logical // num_ranks), -(-(rank + 1) * num_logical // num_ranks))
