"""`sweep.json`: a sweep resumes as it was begun, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray import tune

from raytrain.config import RunConfig
from raytrain.errors import ResumeError
from raytrain.launch.schedule import build_schedule
from raytrain.rundir import RunDir
from raytrain.sweep_config import SweepConfig
from raytrain.tune.scheduling import Algorithms
from raytrain.tune.sweep_file import SWEEP, check_same, describe, earlier_facts, has_trials
from raytrain.tune.trial import TrialTemplate
from tests.golden import check
from tests.support.tasks import Regression


@pytest.fixture
def directory(tmp_path: Path) -> RunDir:
    return RunDir.at(str(tmp_path), "sweep")


def facts(lr: Any = None, sweep: Any = None, space: Any = None, **run: Any) -> dict[str, Any]:
    config, settings = RunConfig(**{"epochs": 2, **run}), SweepConfig(**{"trials": 4, **(sweep or {})})
    space = {"lr": lr or tune.loguniform(0.01, 0.1), **(space or {})}
    algorithms = Algorithms.of(None, None, settings, config, space)
    return describe(TrialTemplate.of(Regression, config), settings, space, algorithms, build_schedule(Regression(), config))


@pytest.mark.parametrize(
    "changed",
    [{"max_failures": 3}, *({"sweep": sweep} for sweep in ({"policy": "best"}, {"workers": 4}, {"concurrent": 2}))],
)
def test_r10_what_only_changes_the_time_may_differ(directory: RunDir, changed: Any) -> None:
    check_same(directory, facts(), facts(**changed))
    check_same(directory, None, facts())


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        *(({"epochs": 3}, "run.epochs: 2 -> 3"), ({"lr": tune.uniform(0.01, 0.1)}, "space.lr: ")),
        ({"space": {"run.seed": tune.choice([1, 2])}}, "space.run.seed: "),
        ({"sweep": {"scheduler": "fifo"}}, "sweep.scheduler: AsyncHyperBandScheduler -> FIFOScheduler"),
        ({"sweep": {"search": "optuna"}}, "sweep.search: random -> OptunaSearch"),
        *(({"sweep": {"trials": 3}}, "sweep.trials: 4 -> 3"), ({"sweep": {"seed": 1}}, "sweep.seed: 0 -> 1")),
    ],
)
def test_r10_what_changes_the_outcome_must_not_differ(directory: RunDir, changed: Any, line: str) -> None:
    with pytest.raises(ResumeError, match=line):
        check_same(directory, facts(), facts(**changed))


def test_r10_all_differences_are_named_at_once(directory: RunDir) -> None:
    before = facts(tune.uniform(0.1, 1), space={"run.seed": tune.choice([1, 2])})
    with pytest.raises(ResumeError) as refused:
        check_same(directory, before, facts(tune.choice([0.1, 0.2]), epochs=3, global_batch=8))
    check("errors/tune_other_sweep.txt", f"{refused.value}\n".replace(directory.path, "SWEEP"))


def domains() -> list[Any]:
    return [
        *(tune.uniform(0.1, 1), tune.uniform(0.1, 2), tune.loguniform(0.1, 1), tune.quniform(0.1, 1, 0.1)),
        *(tune.quniform(0.1, 1, 0.05), tune.qloguniform(0.1, 1, 0.1), tune.randn(0, 1), tune.randn(5, 2)),
        *(tune.qrandn(0, 1, 0.1), tune.randint(1, 3), tune.randint(1, 4), tune.qrandint(1, 9, 2), tune.lograndint(1, 9)),
        *(tune.qlograndint(1, 9, 2), tune.choice([1, 2]), tune.choice([2, 1]), tune.grid_search([1, 2])),
        *(tune.sample_from(lambda: 0.5), 1, "1.5"),
    ]


def test_r10_each_domain_has_a_text_of_its_own_at_each_start() -> None:
    texts = [[facts(domain)["space"]["lr"] for domain in domains()] for _ in range(2)]
    assert texts[0] == texts[1]
    assert " at 0x" not in str(texts), "memory addresses differ"
    assert len(set(texts[0])) == len(domains())


def test_r10_resume_is_explicit(directory: RunDir) -> None:
    assert earlier_facts(directory, "auto") is None
    with pytest.raises(ResumeError):
        earlier_facts(directory, "must")
    directory.write_json({"format": 1}, SWEEP)
    assert earlier_facts(directory, "must") == {"format": 1}
    with pytest.raises(ResumeError):
        earlier_facts(directory, "new")
    Path(directory.child(SWEEP)).write_text("{")
    with pytest.raises(ResumeError, match="is the JSON of a sweep"):
        earlier_facts(directory, "auto")


def test_a_sweep_has_trials_once_ray_tune_has_saved_it(directory: RunDir) -> None:
    assert not has_trials(directory)
    directory.write_json({}, "experiment_state-1.json")
    assert has_trials(directory)
