"""Nothing here may start a Ray: `ray.kill`, for one, would, if it were the real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(autouse=True)
def without_ray() -> Iterator[None]:
    yield
    assert not ray.is_initialized()
