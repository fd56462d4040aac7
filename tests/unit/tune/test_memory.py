"""What a scheduler knew comes back, and speaks of the restored trials."""

from __future__ import annotations

from typing import Any

import pytest
from ray.tune.experiment import Trial
from ray.tune.schedulers import AsyncHyperBandScheduler, HyperBandScheduler, PopulationBasedTraining, TrialScheduler

from raytrain.tune import memory


def trials(*names: str) -> list[Trial]:
    return [Trial("stub", trial_id=name, stub=True) for name in names]


def with_metric(scheduler: Any) -> Any:
    assert scheduler.set_search_properties("loss", "min")
    return scheduler


def asha() -> AsyncHyperBandScheduler:
    return with_metric(AsyncHyperBandScheduler(time_attr="step", max_t=8, grace_period=1, reduction_factor=2))


def test_r15_the_rungs_of_asha_decide_as_if_nothing_had_happened() -> None:
    first, second = trials("a", "b")
    before = asha()
    before.on_trial_add(None, first)
    assert before.on_trial_result(None, first, {"step": 1, "loss": 0.1}) == TrialScheduler.CONTINUE

    after = asha()
    again_first, again_second = trials("a", "b")
    memory.load(memory.dump(before), after, [again_first, again_second])
    after.on_trial_add(None, again_second)
    assert after.on_trial_result(None, again_second, {"step": 1, "loss": 0.2}) == TrialScheduler.STOP

    fresh = asha()
    fresh.on_trial_add(None, second)
    assert fresh.on_trial_result(None, second, {"step": 1, "loss": 0.2}) == TrialScheduler.CONTINUE, "without memory"


@pytest.mark.parametrize(
    "make",
    [
        lambda: PopulationBasedTraining(time_attr="step", hyperparam_mutations={"lr": lambda: 0.1}),
        lambda: HyperBandScheduler(time_attr="step", max_t=9),
    ],
    ids=["pbt", "hyperband"],
)
def test_references_to_trials_are_those_of_the_restored_ones(make: Any) -> None:
    class Controller:
        search_alg = type("Search", (), {"metric": "loss", "is_finished": lambda self: False})()

    before, after = with_metric(make()), with_metric(make())
    for trial in trials("a", "b"):
        before.on_trial_add(Controller(), trial)
    restored = trials("a", "b")
    memory.load(memory.dump(before), after, restored)
    found = after._trial_state if isinstance(after, PopulationBasedTraining) else after._trial_info
    assert {id(trial) for trial in found} == {id(trial) for trial in restored}


def test_what_is_unfinished_is_not_kept() -> None:
    class _FutureTrainingResult:
        def __reduce__(self) -> Any:
            raise AssertionError("it belongs to a process that is gone")

    scheduler = asha()
    scheduler.unfinished = _FutureTrainingResult()
    after = asha()
    memory.load(memory.dump(scheduler), after, [])
    assert after.unfinished is None
