"""A process group of one, in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from raytrain.rendezvous.state import Generation, JoinRequest
from raytrain.worker.group import Group, process_group, serve_store


@pytest.fixture
def group() -> Iterator[Group]:
    store = serve_store("127.0.0.1")
    generation = Generation(1, (JoinRequest("w0", 0, ("127.0.0.1", store.port)),), "start")
    with process_group(generation, "w0", store, torch.device("cpu"), 10.0) as formed:
        yield formed
