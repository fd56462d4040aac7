"""Hears, in a thread of the leader, what the members should do after their step; the step loop only reads a value."""

from __future__ import annotations

import threading

from ray.exceptions import RayError

from raytrain.rendezvous.client import RendezvousClient
from raytrain.rendezvous.state import Signals

PAUSE_S, PAUSE_AFTER_SIGNAL_S = 0.05, 0.25
"""Between two questions: the rendezvous answers at once if there is something to tell, or the generation is an old one."""


class Bell:
    """Watches the rendezvous for one generation."""

    def __init__(self, rendezvous: RendezvousClient, generation: int) -> None:
        self.signals = Signals()
        self._rendezvous, self._generation = rendezvous, generation
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="bell", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        """Goes on after the first signal, since more may come: that all are to leave, or that a stop is asked for."""
        while not self._closed.is_set():
            try:
                self.signals = self._rendezvous.watch(self._generation)
            except RayError:  # it has been away for long; whatever there is to hear will be told when it is back
                self._closed.wait(PAUSE_AFTER_SIGNAL_S)
                continue
            self._closed.wait(PAUSE_S if self.signals == Signals() else PAUSE_AFTER_SIGNAL_S)
