"""Hears, in a thread of the leader, that newcomers wait or that a stop was asked for; the step loop only reads a value."""

from __future__ import annotations

import threading

from raytrain.rendezvous.client import RendezvousClient
from raytrain.worker.step import Signals

PAUSE_S = 0.05
"""Between two questions, which the rendezvous answers at once if the generation is not the latest one any more."""


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
        while not self._closed.is_set():
            newcomers, stop = self._rendezvous.watch(self._generation)
            self.signals = Signals(newcomers, stop)
            if newcomers or stop:
                return
            self._closed.wait(PAUSE_S)
