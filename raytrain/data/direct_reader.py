"""Reads in a thread of the worker itself: for data in memory, and where there is no Ray.

It has no processes to start, so the first step comes at once. The rows are transformed in the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from raytrain.data.reading import Block, Piece, Work, in_order_of_use, units


class DirectReader:
    """Reads one piece after the other, in the order of use. A `Reader`."""

    def parts(self, work: Work) -> Sequence[Callable[[], Iterator[Block | Piece]]]:
        return [lambda: in_order_of_use(work, {logical: units(work, logical) for logical in work.held})]
