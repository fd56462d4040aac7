"""The settings of a run: what each rule says when it is broken, and that settings survive every way they travel."""

from __future__ import annotations

import inspect
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raytrain.config import RunConfig, unknown_name
from raytrain.errors import ConfigError
from raytrain.sweep_config import SweepConfig


def error_of(**settings: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**settings)
    return caught.value


def parts(error: ConfigError) -> tuple[str, str, str, str]:
    return error.where, error.value, error.rule, error.fix


@pytest.mark.parametrize(
    ("given_workers", "workers"),
    [(4, (4, 4)), ("4", (4, 4)), ("1:8", (1, 8)), ((2, 3), (2, 3)), ([2, 3], (2, 3)), (["1:8"], (1, 8)), ([4], (4, 4))],
)
def test_workers_are_a_number_or_a_range(given_workers: Any, workers: tuple[int, int]) -> None:
    config = RunConfig(workers=given_workers)
    assert config.workers == workers
    assert (config.min_workers, config.max_workers) == workers


RANGE = ("is a whole number or a range min:max", "for example 4 or 1:8")
ONE = ("at least 1 worker", "give a number such as 2, or a range such as 1:8")
BEST = ("is min:metric or max:metric", "for example max:valid/accuracy")


@pytest.mark.parametrize(
    ("setting", "value", "shown", "rule_and_fix"),
    [
        ("workers", "many", "many", RANGE),
        ("workers", "1.5", "1.5", RANGE),
        ("workers", 0, "0", ONE),
        ("workers", "0:4", "0:4", ONE),
        ("workers", (-1, 2), "-1:2", ONE),
        ("workers", "8:2", "8:2", ("the smallest number comes first", "write 2:8")),
        ("workers", ["8:2"], "8:2", ("the smallest number comes first", "write 2:8")),
        ("best", "valid/loss", "valid/loss", BEST),
        ("best", "avg:valid/loss", "avg:valid/loss", BEST),
        ("best", "min:", "min:", BEST),
        ("best", "min", "min", BEST),
    ],
)
def test_a_broken_rule_says_where_what_the_rule_and_the_fix(
    setting: str, value: Any, shown: str, rule_and_fix: tuple[str, str]
) -> None:
    assert parts(error_of(**{setting: value})) == (f"run.{setting}", shown, *rule_and_fix)


@pytest.mark.parametrize("name", ["a/b", "..", ".", "../other", "/root", "a\\b", "a\0b", "a\nb"])
def test_r10_a_name_that_leads_out_of_the_storage_is_refused(name: str) -> None:
    rule, fix = "is one plain directory name, without '/' or '..'", "choose a name like digits-lr0.1"
    assert parts(error_of(name=name)) == ("run.name", name, rule, fix)


@pytest.mark.parametrize("name", ["", "digits", "digits-lr0.1", "a..b", "größe_2"])
def test_r10_a_plain_name_is_taken(name: str) -> None:
    assert RunConfig(name=name).name == name


@pytest.mark.parametrize(
    ("settings", "where", "value", "rule", "fix"),
    [
        (
            {"epochs": 1, "steps": 2},
            "run.steps",
            "2, and run.epochs = 1",
            "epochs or steps, not both",
            "leave one of them out",
        ),
        (
            {"workers": "1:4", "logical_workers": 2},
            "run.workers",
            "1:4",
            "at most run.logical_workers = 2 workers, since each needs a share of the batch",
            "raise run.logical_workers to 4, or lower run.workers",
        ),
        (
            {"workers": 4, "global_batch": 3},
            "run.global_batch",
            "3",
            "at least one row for each of 4 logical workers",
            "raise run.global_batch to 4, or lower run.logical_workers or run.workers",
        ),
        (
            {"logical_workers": 100},
            "run.global_batch",
            "64",
            "at least one row for each of 100 logical workers",
            "raise run.global_batch to 100, or lower run.logical_workers or run.workers",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(
    settings: dict[str, Any], where: str, value: str, rule: str, fix: str
) -> None:
    assert parts(error_of(**settings)) == (where, value, rule, fix)


NUMBERS = [name for name, field in RunConfig.model_fields.items() if field.metadata and name not in ("workers", "seed")]


@pytest.mark.parametrize("setting", NUMBERS)
def test_a_number_below_its_limit_is_refused_with_its_meaning(setting: str) -> None:
    may_be_zero = setting in ("keep_best", "max_failures", "spares")
    if may_be_zero:
        assert getattr(RunConfig(**{setting: 0}), setting) == 0
    rule = "input should be greater than " + ("or equal to 0" if may_be_zero else "0")
    for value in (-1,) if may_be_zero else (0, -1):
        meaning = f"give another value; it means: {RunConfig.model_fields[setting].description}"
        assert parts(error_of(**{setting: value})) == (f"run.{setting}", str(value), rule, meaning)


def test_a_seed_fits_in_64_bits() -> None:
    assert RunConfig(seed=2**63 - 1).seed == 2**63 - 1
    assert error_of(seed=2**63).where == error_of(seed=-1).where == "run.seed"


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("resume", "yes", "input should be 'auto', 'new' or 'must'"),
        ("precision", "fp16", "input should be 'fp32' or 'bf16'"),
        ("accelerator", "tpu", "input should be 'auto', 'cpu' or 'gpu'"),
        ("global_batch", "many", "input should be a valid integer, unable to parse string as an integer"),
        ("epochs", 1.5, "input should be a valid integer, got a number with a fractional part"),
        ("collective_timeout_s", math.nan, "input should be greater than 0"),
        ("digest", "every:0", "is off, checkpoints, or every:N"),
    ],
)
def test_a_value_of_another_kind_is_refused(setting: str, value: Any, rule: str) -> None:
    error = error_of(**{setting: value})
    assert (error.where, error.value, error.rule) == (f"run.{setting}", str(value), rule)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("globl_batch", "run.global_batch"),
        ("global-batch", "run.global_batch"),
        ("worker", "run.workers"),
        ("epoch", "run.epochs"),
        ("checkpoint_evry", "run.checkpoint_every"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(typed: str, meant: str) -> None:
    error = error_of(**{typed: 3})
    assert (error.where, error.value, error.fix) == (f"run.{typed}", "no such name", f"did you mean {meant}?")
    assert "run.global_batch, " in error.rule


def test_a_name_that_is_near_to_none_leads_to_the_help() -> None:
    assert unknown_name("qqqqqqqq", ["lr", "hidden"]).fix == "see --help"


@pytest.mark.parametrize("model", [RunConfig, SweepConfig])
def test_help_shows_each_setting_with_type_default_and_meaning(model: type[RunConfig] | type[SweepConfig]) -> None:
    text = " ".join((inspect.getdoc(model) or "").split())
    for name, field in model.model_fields.items():
        assert f", default {field.get_default()!r}): {' '.join(str(field.description).split())}" in text, name
    assert "workers (tuple[int, int], default (1, 1)): Worker processes" in str(inspect.getdoc(RunConfig)).replace(
        "\n        ", " "
    )


def test_the_logical_workers_are_by_default_as_many_as_the_most_workers() -> None:
    assert RunConfig(workers="1:4").num_logical == 4
    assert RunConfig(workers="1:4", logical_workers=6).num_logical == 6


def test_settings_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().seed = 1  # type: ignore[misc]


configs = st.builds(
    RunConfig,
    name=st.sampled_from(["", "digits", "a..b"]),
    resume=st.sampled_from(["auto", "new", "must"]),
    workers=st.tuples(st.integers(1, 4), st.integers(4, 8)),
    logical_workers=st.none() | st.integers(8, 16),
    global_batch=st.integers(16, 2**40),
    epochs=st.none() | st.integers(1, 100),
    seed=st.integers(0, 2**63 - 1),
    clip_norm=st.none() | st.floats(1e-9, 1e9),
    precision=st.sampled_from(["fp32", "bf16"]),
    best=st.sampled_from(["min:valid/loss", "max:a:b"]),
    drop_last=st.booleans(),
)


@given(configs)
def test_settings_survive_every_way_they_travel(config: RunConfig) -> None:
    assert RunConfig(**config.model_dump()) == config
    assert RunConfig(**config.model_dump(mode="json")) == config
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(RunConfig(**config.model_dump())) == hash(config)
