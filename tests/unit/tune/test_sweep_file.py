"""`sweep.json`: a sweep resumes as it was begun, or not at all."""

from __future__ import annotations

from functools import partial
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


HELPER = """
SCALE = {scale}

def half(value):
    return value / {divisor}

{space}def rate(config, factor={default}):
    return SCALE * half(config["width"]) * factor * base
"""


def written(scale: int = 3, divisor: int = 2, default: float = 0.5, space: str = "", base: float = 1.0) -> Any:
    """A function of a user's script, as it is in one version of that script."""
    names: dict[str, Any] = {"__name__": "script", "base": base}
    exec(HELPER.format(scale=scale, divisor=divisor, default=default, space=space), names)
    return names["rate"]


class Rule:
    """A callable object."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, config: Any) -> float:
        return self.factor


def captures(value: float) -> Any:
    return lambda config: value


def test_r10_a_function_of_the_space_that_was_edited_is_refused(directory: RunDir) -> None:
    """Its own code, a default, a captured value, a global one, or a function that it calls; another line changes nothing."""

    def before(function: Any) -> dict[str, Any]:
        return facts(tune.sample_from(function))

    check_same(directory, before(written()), before(written(space="\n\n")))
    for edited in ({"scale": 4}, {"divisor": 3}, {"default": 0.6}, {"base": 2.0}):
        with pytest.raises(ResumeError, match=r"space\.lr: Function rate with code \w{16} -> Function rate with code"):
            check_same(directory, before(written()), before(written(**edited)))
    for one in (captures, Rule, lambda value: partial(captures(1.0), value), lambda value: Rule(value).__call__):
        check_same(directory, before(one(0.1)), before(one(0.1)))
        with pytest.raises(ResumeError, match=r"space\.lr"):
            check_same(directory, before(one(0.1)), before(one(0.2)))


def test_r10_functions_among_the_values_of_a_space_have_no_addresses(directory: RunDir) -> None:
    for kind in (tune.choice, tune.grid_search, lambda values: {"nested": tune.choice(values)}):
        check_same(directory, facts(kind([captures(1.0), Rule(2.0)])), facts(kind([captures(1.0), Rule(2.0)])))
        with pytest.raises(ResumeError, match=r"space\.lr"):
            check_same(directory, facts(kind([captures(1.0)])), facts(kind([captures(2.0)])))


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
