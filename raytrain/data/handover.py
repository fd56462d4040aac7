"""At which step does Ray Data take over from direct reading?

Direct reading goes on until Ray Data has proved that it runs; then a step a little ahead is agreed on, up to which the
direct reading goes, at its pace so far, while Ray Data reads what comes after. Each unit is read by one of the two. It
reads nothing itself. Runs in the worker; shared by the two threads that read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import dropwhile

from raytrain.data.reading import Piece, Unit, Work, by_first_use, in_order_of_use, units

LEAD_S = 2.0  # Ray Data, once it runs, has its first block after 0.2 s, or 1.5 s where others use the processors too
MIN_ELAPSED_S = 0.1
LEAD_ROWS = 1024  # of a logical worker, at least, in case the training has only just begun


class Handover:
    """Divides the units of a worker between a thread that reads directly and Ray Data.

    Args:
        work: what is to be read.
        clock: seconds that pass.
    """

    def __init__(self, work: Work, clock: Callable[[], float] = time.monotonic) -> None:
        self._work, self._clock = work, clock
        self._lock = threading.Lock()
        self._began_s = clock()
        self._rows = self._bytes = 0  # that were read directly
        self._latest = work.first_step  # the first use of the latest unit that was given to the direct reading
        self._step: int | None = None  # units of this step and later ones are Ray Data's

    def pieces(self) -> Iterator[Piece]:
        """What is read directly, here and now, in the order of use. For one thread."""
        work = self._work
        for piece in in_order_of_use(work, {logical: self._until_ray(logical) for logical in work.held}):
            self._rows += piece.num_wanted
            self._bytes += sum(values[piece.wanted].nbytes for values in piece.block.columns.values())
            yield piece

    def agree(self) -> Iterator[Unit]:
        """Agrees on the step, and gives Ray Data its units, in the order of first use."""
        work = replace(self._work, plan=replace(self._work.plan))  # a plan remembers epochs, for one thread at a time
        share = work.plan.global_batch / work.plan.num_logical
        rows = self._rows / len(work.held)  # of each logical worker
        lead = max(LEAD_ROWS, rows * LEAD_S / max(self._clock() - self._began_s, MIN_ELAPSED_S))
        with self._lock:
            step = self._step = max(self._latest, work.first_step + int((rows + lead) / share)) + 1
        later = {logical: dropwhile(lambda unit: work.first_use(unit) < step, units(work, logical)) for logical in work.held}
        return by_first_use(work, later)

    @property
    def row_bytes(self) -> float:
        """Bytes of a row, as far as is known."""
        return self._bytes / max(self._rows, 1)

    def _until_ray(self, logical: int) -> Iterator[Unit]:
        for unit in units(self._work, logical):
            first_use = self._work.first_use(unit)
            with self._lock:
                if self._step is not None and first_use >= self._step:
                    return
                self._latest = max(self._latest, first_use)
            yield unit
