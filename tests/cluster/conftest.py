"""What cluster tests share: one small Ray for a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray


@pytest.fixture(scope="module")
def small_ray() -> Iterator[None]:
    """Two CPUs, for the whole module; runs inside use it, since it is there."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    path.touch()
    return path
