"""Settings of all tests: two processes, of which one has all tests that start a Ray, one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")

CLUSTER = Path(__file__).parent / "cluster"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if CLUSTER in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("ray"))
