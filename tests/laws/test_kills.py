"""P2: a kill at any place of a step costs at most the step in flight, and none that was committed is done again."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.events.kinds import StepsDone
from raytrain.events.log import read
from raytrain.report.audit import audit
from tests.laws.compare import assert_same, by_hand, settings
from tests.support.child import PLACES
from tests.support.local import Kill, LocalRun, Plot

AT_BOUNDARY = {"before evaluation": 13, "after evaluation": 13, "while saving": 13}
"""Places that are only passed at the end of an epoch."""

AT_START = {"before handing over": -1, "after handing over": 0}


def check(run: LocalRun) -> None:
    steps = run.run()
    assert_same(run.run_dir, steps, by_hand("dropout", settings()))
    assert audit(run.run_dir).passed
    recorded = [e.first_step + i for e in read(run.run_dir) if isinstance(e, StepsDone) for i in range(len(e.losses))]
    assert recorded == sorted(set(recorded)), "a committed step was done again"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", ["w0", "w1"])
@pytest.mark.parametrize("place", sorted(set(PLACES) - set(AT_START)))
def test_a_kill_at_any_place_of_a_step_does_not_change_the_result(place: str, victim: str, tmp_path: Path) -> None:
    if place == "while saving" and victim == "w1":
        victim = "w0"  # only the leader saves
    from tests.support.tasks import TASKS

    kill = Kill(victim, place, AT_BOUNDARY.get(place, 17))
    check(LocalRun(TASKS["dropout"], settings(), tmp_path, Plot(3, kills=[kill], replace=False)))
