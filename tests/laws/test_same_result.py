"""P2, P3, P4: the result does not depend on the workers. Compared with a plain PyTorch loop that knows nothing of us."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.report.audit import audit
from tests.laws.compare import assert_same, by_hand, settings
from tests.support.local import Kill, LocalRun, Plot
from tests.support.tasks import TASKS

PLOTS = {
    "1 worker": Plot(1),
    "2 workers": Plot(2),
    "3 workers": Plot(3),
    "kill -9 and rejoin": Plot(2, kills=[Kill("w1", "after backward", 11)], hold=25),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("plot", PLOTS)
@pytest.mark.parametrize("kind", TASKS)
def test_r3_r4_losses_and_weights_are_those_of_one_process(kind: str, plot: str, tmp_path: Path) -> None:
    run = LocalRun(TASKS[kind], settings(), tmp_path, PLOTS[plot])
    steps = run.run()
    assert_same(run.run_dir, steps, by_hand(kind, settings()))
    assert audit(run.run_dir).passed
    if run.plot.kills:
        assert {member.worker for member in run.generations[0].members} == {"w0", "w1"}
        assert {member.worker for member in run.generations[-1].members} == {"w0", "w2"}
