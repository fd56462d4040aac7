"""Schedulers and searchers: by name or given, what goes together, and a scheduler's state over a restart."""

from __future__ import annotations

from typing import Any

import pytest
from ray import tune
from ray.tune import schedulers
from ray.tune.experiment import Trial
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, HyperBandScheduler, PopulationBasedTraining
from ray.tune.search import BasicVariantGenerator
from ray.tune.search.optuna import OptunaSearch

from raytrain.config import RunConfig
from raytrain.errors import ConfigError
from raytrain.sweep_config import SweepConfig
from raytrain.tune.scheduling import Algorithms, dump_scheduler, load_scheduler
from tests.golden import check

SPACE = {"lr": tune.uniform(0, 1)}
GRID = {"lr": tune.grid_search([1])}


def choose(scheduler: Any = None, searcher: Any = None, space: Any = None, run: Any = None, **sweep: Any) -> Algorithms:
    return Algorithms.of(scheduler, searcher, SweepConfig(**sweep), RunConfig(**run or {"epochs": 30}), space or SPACE)


def pbt(**changed: Any) -> PopulationBasedTraining:
    return PopulationBasedTraining(time_attr="epoch", hyperparam_mutations={"lr": [0.1], **changed})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("asha", AsyncHyperBandScheduler), ("hyperband", HyperBandScheduler), ("median", schedulers.MedianStoppingRule)),
        ("fifo", FIFOScheduler),
    ],
)
def test_schedulers_have_names(name: str, kind: type) -> None:
    assert type(Algorithms.of(None, None, SweepConfig(scheduler=name), RunConfig(epochs=3), SPACE).scheduler) is kind


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        ({"searcher": [OptunaSearch(), OptunaSearch()]}, "two_searchers"),
        ({"scheduler": pbt(), "search": "optuna"}, "optuna_with_pbt"),
        ({"search": "optuna", "space": GRID}, "grid_with_optuna"),
        ({"scheduler": pbt(**{"run.global_batch": [8, 16]})}, "pbt_changes_rows"),
        ({"scheduler": AsyncHyperBandScheduler(metric="loss", mode="min")}, "scheduler_with_metric"),
        ({"scheduler": HyperBandScheduler(), "concurrent": 2}, "hyperband_concurrent"),
        ({"scheduler": HyperBandScheduler(), "workers": 4}, "hyperband_workers"),
        ({"searcher": OptunaSearch(space=SPACE, metric="loss", mode="min")}, "searcher_with_space"),
    ],
)
def test_r15_what_does_not_go_together_is_refused(arguments: Any, mistake: str) -> None:
    with pytest.raises(ConfigError) as refused:
        choose(**arguments)
    check(f"errors/tune_{mistake}.txt", f"{refused.value}\n")


def test_pb2_must_not_change_rows_either() -> None:
    bounded = FIFOScheduler()
    bounded._hyperparam_bounds = {"run.seed": [0, 9]}
    with pytest.raises(ConfigError, match=r"changes run\.seed"):
        choose(bounded)


def test_what_goes_together_is_used_as_given() -> None:
    scheduler, searcher = pbt(), OptunaSearch()
    assert choose(scheduler).scheduler is scheduler
    assert choose(searcher=searcher).searcher is searcher
    assert type(choose(search="optuna").searcher) is OptunaSearch
    assert choose(space=GRID, concurrent=2, workers=4).searcher is None


@pytest.mark.parametrize(
    ("run", "axis", "grace", "length"),
    [
        *(({"epochs": 1}, "epoch", 1, 1), ({"epochs": 30}, "epoch", 1, 30), ({"epochs": 270}, "epoch", 10, 270)),
        *(({"steps": 900}, "step", 33, 900), ({"steps": 900, "eval_every": 50}, "step", 50, 900)),
        ({"steps": 40, "eval_every": 50}, "step", 40, 40),
    ],
)
def test_the_first_rung_is_not_before_the_first_evaluation(run: Any, axis: str, grace: int, length: int) -> None:
    scheduler = choose(run=run).scheduler
    assert (scheduler._time_attr, scheduler._brackets[0]._rungs[-1][0], scheduler._max_t) == (axis, grace, length)


@pytest.mark.parametrize(("concurrent", "max_trials", "expected"), [(None, None, 4), (2, 3, 2), (None, 3, 3)])
def test_a_searcher_that_learns_does_not_run_ahead_of_the_cluster(
    concurrent: int | None, max_trials: int | None, expected: int
) -> None:
    sweep = SweepConfig(concurrent=concurrent)
    searcher, limit = choose(search="optuna").search(sweep, max_trials, 4)
    assert (type(searcher), limit) == (OptunaSearch, expected)
    random, limit = choose().search(sweep, max_trials, 4)
    is_limited = concurrent is not None or max_trials is not None
    assert (type(random), limit, random.max_concurrent) == (BasicVariantGenerator, None, expected if is_limited else 0)


# The state over a restart


def trials(*names: str) -> list[Trial]:
    return [Trial("stub", trial_id=name, stub=True) for name in names]


def with_metric(scheduler: Any) -> Any:
    assert scheduler.set_search_properties("loss", "min")
    return scheduler


def asha(max_t: int = 8) -> Any:
    return with_metric(AsyncHyperBandScheduler(time_attr="step", max_t=max_t, grace_period=1, reduction_factor=2))


class Controller:
    """What schedulers use of Ray Tune's loop."""

    search_alg = type("Search", (), {"metric": "loss", "is_finished": lambda self: False})()


def test_r15_a_restored_asha_decides_as_the_old_one_would() -> None:
    first, second = trials("a", "b")
    before, fresh, after = asha(), asha(), asha(max_t=100)
    before.on_trial_add(None, first)
    assert before.on_trial_result(None, first, {"step": 1, "loss": 0.1}) == schedulers.TrialScheduler.CONTINUE
    load_scheduler(dump_scheduler(before), after, [first, second])
    assert after._max_t == 8, "settings are restored, too"
    for scheduler, expected in ((after, schedulers.TrialScheduler.STOP), (fresh, schedulers.TrialScheduler.CONTINUE)):
        scheduler.on_trial_add(None, second)
        assert scheduler.on_trial_result(None, second, {"step": 1, "loss": 0.2}) == expected


@pytest.mark.parametrize("make", [pbt, lambda: HyperBandScheduler(time_attr="step", max_t=9)], ids=["pbt", "hyperband"])
def test_a_restored_scheduler_refers_to_the_restored_trials(make: Any) -> None:
    before, after = with_metric(make()), with_metric(make())
    for trial in trials("a", "b"):
        before.on_trial_add(Controller(), trial)
    restored = trials("a", "b")
    load_scheduler(dump_scheduler(before), after, restored)
    found = after._trial_state if isinstance(after, PopulationBasedTraining) else after._trial_info
    assert {id(trial) for trial in found} == {id(trial) for trial in restored}


def test_a_trial_that_was_not_restored_has_ended() -> None:
    before, after = with_metric(pbt()), with_metric(pbt())
    for number, trial in enumerate(trials("a", "b", "gone")):
        before.on_trial_add(Controller(), trial)
        before._trial_state[trial].last_score = float(number)
    restored = trials("a", "b")
    load_scheduler(dump_scheduler(before), after, restored)
    lower, upper = after._quantiles()
    assert [trial.trial_id for trial in (*lower, *upper)] == ["a", "b"]
    assert after._trial_state[restored[1]].last_score == 1.0


def test_a_checkpoint_that_is_still_being_saved_is_not_kept() -> None:
    class _FutureTrainingResult:
        def __reduce__(self) -> Any:
            raise AssertionError("it belongs to a process that has ended")

    before, after = asha(), asha()
    before.unfinished = _FutureTrainingResult()
    load_scheduler(dump_scheduler(before), after, [])
    assert after.unfinished is None
