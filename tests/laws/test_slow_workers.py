"""P6, P1: peers that are alive and getting on are waited for, whatever they do; those that are not are left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain.report.audit import audit
from tests.laws.compare import assert_same, by_hand, settings
from tests.support.local import Break, Plot
from tests.support.tasks import TASKS
from tests.support.watched import WatchedRun

LIMITS: dict[str, Any] = {"heartbeat_timeout_s": 1.5, "hang_timeout_s": 3.0, "collective_timeout_s": 1.0}
SHORT_STEP = 12
"""The first step with micro-batches of another shape, for which code would be compiled again."""


@pytest.mark.timeout(120)
def test_r6_slow_workers_are_waited_for_whatever_they_are_slow_in(tmp_path: Path) -> None:
    """All take longer than the collective timeout and the heartbeat timeout; the first call with new shapes, than any."""
    slow = [
        Break("w1", "loss", 3, "sleep", 2.0),
        Break("w1", "loss", 6, "hold the GIL", 2.5),
        Break("w1", "loss", SHORT_STEP, "sleep", 4.0),
        Break("w0", "metrics", SHORT_STEP + 1, "sleep", 2.0),
    ]
    run = WatchedRun(TASKS["dropout"], settings(epochs=2, **LIMITS), tmp_path, Plot(2, kills=slow))
    steps = run.run()
    assert (run.evicted, len(run.generations)) == ({}, 1), "nobody was lost, and the group stayed whole"
    assert_same(run.run_dir, steps, by_hand("dropout", settings(epochs=2)))
    assert audit(run.run_dir).passed


@pytest.mark.timeout(120)
def test_r6_a_worker_that_vanishes_is_left_behind_though_its_connections_stay(tmp_path: Path) -> None:
    """As when its node is cut off: nobody resets them, and gloo alone would wait."""
    stops = [Break("w1", "loss", 5, "stop")]
    plot = Plot(2, kills=stops, replace=False)
    run = WatchedRun(TASKS["dropout"], settings(epochs=2, **LIMITS), tmp_path, plot, is_cut_off=True)
    steps = run.run()
    assert list(run.evicted) == ["w1"]
    assert [[member.worker for member in formed.members] for formed in run.generations] == [["w0", "w1"], ["w0"]]
    assert_same(run.run_dir, steps, by_hand("dropout", settings(epochs=2)))
