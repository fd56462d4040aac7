"""A search space as text: each form, the kinds of values, and what a wrong name or value is answered."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field
from ray import tune
from ray.tune.search.sample import Categorical, Domain, Float, Integer

from raytrain.config import RunConfig
from raytrain.errors import ConfigError
from raytrain.task import Task
from raytrain.tune.space import OF_THE_SWEEP, check_keys, kinds_of, parse, parse_space

DRAWS = 2000


class Digits(Task):
    lr: float = 0.1
    hidden: int = Field(128, gt=0)
    dropout: float | None = Field(None, ge=0, lt=1)
    with_bias: bool = True
    activation: Literal["relu", "gelu"] = "relu"
    path: str
    label: str | None = None


def drawn(domain: Domain) -> list[Any]:
    """Many values of a domain."""
    return list(domain.sample(size=DRAWS, random_state=np.random.RandomState(0)))


def one(name: str, text: str) -> Any:
    return parse_space({name: text}, Digits)[name]


def error_of(name: str, text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        one(name, text)
    return caught.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("log:1e-3:1", tune.loguniform(1e-3, 1)),
        ("uniform:-1:0.5", tune.uniform(-1, 0.5)),
        ("0:1", tune.uniform(0, 1)),
        ("q:0:1:0.1", tune.quniform(0, 1, 0.1)),
    ],
)
def test_ranges_of_a_float_are_those_of_ray_tune(text: str, expected: Float) -> None:
    domain = parse(text, float)
    assert isinstance(domain, Float)
    assert (domain.lower, domain.upper) == (expected.lower, expected.upper)
    assert type(domain.get_sampler()) is type(expected.get_sampler())
    assert drawn(domain) == drawn(expected)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("2:4", {2, 3, 4}),
        ("uniform:2:4", {2, 3, 4}),
        ("log:1:3", {1, 2, 3}),
        ("q:32:96:32", {32, 64, 96}),
        ("q:2:4:1", {2, 3, 4}),
        ("-1:1", {-1, 0, 1}),
    ],
)
def test_ranges_of_whole_numbers_include_both_ends(text: str, values: set[int]) -> None:
    domain = parse(text, int)
    assert isinstance(domain, Integer)
    assert set(drawn(domain)) == values


def test_a_logarithmic_range_of_whole_numbers_prefers_small_ones() -> None:
    values = drawn(parse("log:1:1000", int))
    assert np.median(values) < 60
    assert np.median(drawn(parse("1:1000", int))) > 400


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("hidden", "choice:32,64,128", [32, 64, 128]),
        ("lr", "choice:1e-3,1", [0.001, 1.0]),
        ("activation", "choice:relu,gelu", ["relu", "gelu"]),
        ("path", "choice:a:b,c", ["a:b", "c"]),
        ("with_bias", "choice:true,false", [True, False]),
        ("dropout", "choice:None,0.5", [None, 0.5]),
        ("label", "choice:None,x", [None, "x"]),
        ("run.workers", "choice:1,1:4", [(1, 1), (1, 4)]),
        ("run.precision", "choice:fp32,bf16", ["fp32", "bf16"]),
    ],
)
def test_each_choice_is_read_as_the_field_would_read_it(name: str, text: str, values: list[Any]) -> None:
    domain = one(name, text)
    assert isinstance(domain, Categorical)
    assert domain.categories == values
    assert [type(value) for value in domain.categories] == [type(value) for value in values]


def test_a_grid_takes_each_value() -> None:
    assert one("lr", "grid:0.1,0.2") == tune.grid_search([0.1, 0.2])


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("lr", "0.5", 0.5),
        ("hidden", "64", 64),
        ("with_bias", "no", False),
        ("path", "s3://bucket/a,b", "s3://bucket/a,b"),
        ("run.workers", "1:4", (1, 4)),
        ("dropout", "None", None),
    ],
)
def test_one_plain_value_is_a_constant(name: str, text: str, value: Any) -> None:
    assert one(name, text) == value


def test_a_space_keeps_its_names_and_their_order() -> None:
    space = parse_space({"run.global_batch": "choice:32,64", "lr": "log:1e-3:1"}, Digits)
    assert list(space) == ["run.global_batch", "lr"]
    assert (type(space["run.global_batch"]), type(space["lr"])) == (Categorical, Float)


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("lr", "log:0:1", "a logarithmic range begins above 0"),
        ("lr", "1:0", "the ends of a range are two finite numbers, the smaller one first"),
        ("lr", "1:1", "the ends of a range are two finite numbers, the smaller one first"),
        ("lr", "0:inf", "the ends of a range are two finite numbers, the smaller one first"),
        ("lr", "nan:1", "the ends of a range are two finite numbers, the smaller one first"),
        ("lr", "0:1:2", "a range is LOW:HIGH, log:LOW:HIGH or q:LOW:HIGH:STEP"),
        ("lr", "log:1", "a range is LOW:HIGH, log:LOW:HIGH or q:LOW:HIGH:STEP"),
        ("lr", "q:0:1", "a range is LOW:HIGH, log:LOW:HIGH or q:LOW:HIGH:STEP"),
        ("lr", "q:0:1:0", "the step of a range is above 0"),
        ("lr", "q:0:1:0.3", "both ends are multiples of the step 0.3"),
        ("lr", "lgo:0:1", "a range is LOW:HIGH, log:LOW:HIGH or q:LOW:HIGH:STEP"),
        ("lr", "a:1", "input should be a valid number, unable to parse string as a number"),
        ("lr", "choice:", "input should be a valid number, unable to parse string as a number"),
        ("lr", "choice:1,,2", "input should be a valid number, unable to parse string as a number"),
        ("hidden", "1:2.5", "input should be a valid integer, unable to parse string as an integer"),
        ("hidden", "choice:64,1.5", "input should be a valid integer, unable to parse string as an integer"),
        ("hidden", "0:10", "input should be greater than 0"),
        ("dropout", "uniform:0:2", "input should be less than 1"),
        ("dropout", "q:0:1:0.5", "input should be less than 1"),
        ("dropout", "grid:0,1", "input should be less than 1"),
        ("activation", "choice:relu,tanh", "input should be 'relu' or 'gelu'"),
        ("with_bias", "0:1", "input should be a valid boolean, unable to interpret input"),
        ("with_bias", "log:1:2", "only numbers have a range"),
        ("path", "uniform:0:1", "only numbers have a range"),
        ("run.workers", "choice:1:2,x", "is a whole number or a range min:max"),
        ("run.epochs", "0:3", "input should be greater than 0"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_with_its_rule(name: str, text: str, rule: str) -> None:
    error = error_of(name, text)
    assert (error.where, error.value, error.rule) == (f"sweep.space.{name}", text, rule)
    assert error.fix


def test_an_end_that_is_never_drawn_need_not_be_a_value_of_the_field() -> None:
    assert one("dropout", "0:1").upper == 1
    assert parse("log:0.5:1", Annotated[float, Field(gt=0.5, lt=1)]).lower == 0.5
    assert error_of("dropout", "-0.1:1").rule == "input should be greater than or equal to 0"


def test_multiples_stay_within_a_field_even_where_they_are_rounded() -> None:
    kind = Annotated[float, Field(le=0.3)]
    with pytest.raises(ConfigError, match=r"less than or equal to 0\.3"):
        parse("q:0:0.3:0.1", kind)  # 3 * 0.1 is above 0.3
    assert max(drawn(parse("q:0:0.3:0.1", float))) > 0.3


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("hiden", "did you mean sweep.space.hidden?"),
        ("run.global_bach", "did you mean sweep.space.run.global_batch?"),
        ("global_batch", "did you mean sweep.space.run.global_batch?"),
        ("xyz", "see --help"),
        ("", "see --help"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_one(name: str, fix: str) -> None:
    error = error_of(name, "0:1")
    assert (error.where, error.value, error.fix) == (f"sweep.space.{name}", "no such name", fix)
    assert "(lr, hidden, dropout, with_bias, activation, path, label)" in error.rule


@pytest.mark.parametrize("name", ["name", "storage", "resume", "best"])
def test_what_a_sweep_sets_itself_is_refused_with_the_reason(name: str) -> None:
    error = error_of(f"run.{name}", "choice:a,b")
    assert (error.where, error.rule) == (f"sweep.space.run.{name}", OF_THE_SWEEP[f"run.{name}"])
    assert error.fix == f"leave it out; run.{name} is given for the whole sweep"


@pytest.mark.parametrize("texts", [{}])
def test_an_empty_space_is_refused(texts: Mapping[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"sweep\.space\n  value: empty"):
        parse_space(texts, Digits)


def test_names_given_from_python_are_those_of_a_function_or_of_the_run() -> None:
    check_keys({"width": 1, "run.seed": 2}, ["width", "depth"])
    with pytest.raises(ConfigError, match=r"did you mean sweep\.space\.width\?"):
        check_keys(["widht"], ["width", "depth"])
    with pytest.raises(ConfigError, match="it has none"):
        check_keys(["width"], [])


def test_every_setting_that_is_not_the_sweeps_may_be_in_a_space() -> None:
    check_keys([f"run.{name}" for name in RunConfig.model_fields if f"run.{name}" not in OF_THE_SWEEP], [])
    assert OF_THE_SWEEP.keys() <= {f"run.{name}" for name in RunConfig.model_fields}


def test_the_kinds_of_an_annotation_are_without_none_and_constraints() -> None:
    assert kinds_of(float | None) == [float]
    assert kinds_of(Annotated[Annotated[int, Field(gt=0)] | None, "x"]) == [int]
    assert kinds_of(int | float) == [int, float]
    assert kinds_of(tuple[int, int]) == [tuple[int, int]]
    assert isinstance(parse("0:1", int | float), Float)
    assert isinstance(parse("0:1", int | None), Integer)


def test_a_mistake_is_told_before_ray_tune_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    monkeypatch.delattr("ray.tune")
    assert error_of("lr", "log:0:1").value == "log:0:1"
    with pytest.raises(ImportError):
        one("lr", "log:1:2")
