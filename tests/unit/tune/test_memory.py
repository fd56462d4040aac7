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


def pbt() -> PopulationBasedTraining:
    return PopulationBasedTraining(time_attr="step", hyperparam_mutations={"lr": lambda: 0.1})


class Controller:
    """What schedulers ask of Ray Tune's loop."""

    search_alg = type("Search", (), {"metric": "loss", "is_finished": lambda self: False})()


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
        pbt,
        lambda: HyperBandScheduler(time_attr="step", max_t=9),
    ],
    ids=["pbt", "hyperband"],
)
def test_references_to_trials_are_those_of_the_restored_ones(make: Any) -> None:
    before, after = with_metric(make()), with_metric(make())
    for trial in trials("a", "b"):
        before.on_trial_add(Controller(), trial)
    restored = trials("a", "b")
    memory.load(memory.dump(before), after, restored)
    found = after._trial_state if isinstance(after, PopulationBasedTraining) else after._trial_info
    assert {id(trial) for trial in found} == {id(trial) for trial in restored}


def test_a_trial_that_was_not_restored_is_forgotten_as_if_it_had_never_been() -> None:
    before, after = with_metric(pbt()), with_metric(pbt())
    for number, trial in enumerate(trials("a", "b", "gone")):
        before.on_trial_add(Controller(), trial)
        before._trial_state[trial].last_score = float(number)
    memory.load(memory.dump(before), after, trials("a", "b"))
    lower, upper = after._quantiles()
    assert [trial.trial_id for trial in (*lower, *upper)] == ["a", "b"]


def test_what_pbt_knew_of_a_trial_is_that_of_the_restored_one() -> None:
    before, after = with_metric(pbt()), with_metric(pbt())
    (trial,), (restored,) = trials("a"), trials("a")
    before.on_trial_add(Controller(), trial)
    before._trial_state[trial].last_score, before._trial_state[trial].last_perturbation_time = -0.5, 20
    memory.load(memory.dump(before), after, [restored])
    assert (after._trial_state[restored].last_score, after._trial_state[restored].last_perturbation_time) == (-0.5, 20)


def test_settings_that_a_new_scheduler_of_the_same_kind_was_given_are_the_old_ones_again() -> None:
    after = with_metric(AsyncHyperBandScheduler(time_attr="step", max_t=100, grace_period=50))
    memory.load(memory.dump(asha()), after, [])
    assert (after._max_t, after._metric, after._mode) == (8, "loss", "min")


def test_what_is_unfinished_is_not_kept() -> None:
    class _FutureTrainingResult:
        def __reduce__(self) -> Any:
            raise AssertionError("it belongs to a process that is gone")

    scheduler = asha()
    scheduler.unfinished = _FutureTrainingResult()
    after = asha()
    memory.load(memory.dump(scheduler), after, [])
    assert after.unfinished is None
