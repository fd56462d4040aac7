"""Loaders that read with Ray Data, in a process of their own: see `data_feed`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.data.every_source import SOURCES


@pytest.mark.timeout(400)
def test_r1_r13_loaders_give_the_same_rows_when_ray_data_reads_them() -> None:
    tests = Path(__file__).with_name("data_feed.py")
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", str(tests)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=390, check=False).stdout
    assert (said.count(" PASSED"), " ERROR" in said) == (13 + len(SOURCES), False), said
