"""A process group of one, in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from raytrain.rendezvous.state import Entrant, Generation
from raytrain.worker.group import Group, form, serve_store


@pytest.fixture
def group() -> Iterator[Group]:
    store = serve_store("127.0.0.1")
    generation = Generation(1, (Entrant("w0", 0, ("127.0.0.1", store.port)),), "start")
    with form(generation, "w0", store, torch.device("cpu"), 10.0) as formed:
        yield formed
