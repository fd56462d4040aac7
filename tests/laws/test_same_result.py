"""P2, P3, P4: the result does not depend on the workers. Compared with a plain PyTorch loop that knows nothing of us."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.report.audit import audit
from tests.laws.compare import assert_same, by_hand, settings
from tests.support.local import Kill, LocalRun, Plot
from tests.support.tasks import TASKS

REJOIN = "kill -9 and rejoin"
PLOTS = {"1 worker": Plot(1), "3 workers": Plot(3), REJOIN: Plot(2, kills=[Kill("w1", "after backward", 11)], hold=25)}
CASES = [("dropout", "1 worker"), *((kind, plot) for kind in TASKS for plot in ("3 workers", REJOIN))]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("kind", "plot"), CASES)
def test_r3_r4_losses_and_weights_are_those_of_one_process(kind: str, plot: str, tmp_path: Path) -> None:
    run = LocalRun(TASKS[kind], settings(), tmp_path, PLOTS[plot])
    steps = run.run()
    assert_same(run.run_dir, steps, by_hand(kind, settings()))
    assert audit(run.run_dir).passed
    if run.plot.kills:
        assert {member.worker for member in run.generations[0].members} == {"w0", "w1"}
        assert {member.worker for member in run.generations[-1].members} == {"w0", "w2"}
