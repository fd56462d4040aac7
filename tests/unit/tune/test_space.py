"""A search space as text: each form, the kinds of values, and what is refused."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, Field
from ray import tune
from ray.tune.search.sample import Categorical, Float, Integer

from raytrain.config import RunConfig
from raytrain.errors import ConfigError
from raytrain.task import Task
from raytrain.tune.space import OF_THE_SWEEP, check_keys, example, num_trials, parse, parse_space
from raytrain.tune.trial import TrialTemplate

FORMS = "a range is LOW:HIGH, log:LOW:HIGH or q:LOW:HIGH:STEP"
FINITE = "the ends of a range are two finite numbers, the smaller one first"
A_NUMBER = "input should be a valid number, unable to parse string as a number"
AN_INTEGER = "input should be a valid integer, unable to parse string as an integer"


class Digits(Task):
    lr: float = 0.1
    hidden: int = Field(128, gt=0)
    dropout: float | None = Field(None, ge=0, lt=1)
    with_bias: bool = True
    activation: Literal["relu", "gelu"] = "relu"
    path: str
    label: str | None = None


def sampled(domain: Any) -> list[Any]:
    return list(domain.sample(size=2000, random_state=np.random.RandomState(0)))


def one(name: str, text: str) -> Any:
    return parse_space({name: text}, Digits)[name]


def error_of(name: str, text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        one(name, text)
    return caught.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("log:1e-3:1", tune.loguniform(1e-3, 1)), ("uniform:-1:0.5", tune.uniform(-1, 0.5)), ("0:1", tune.uniform(0, 1))),
        ("q:0:1:0.1", tune.quniform(0, 1, 0.1)),
    ],
)
def test_ranges_of_a_float_are_those_of_ray_tune(text: str, expected: Float) -> None:
    domain = parse(text, float)
    assert (type(domain), domain.lower, domain.upper) == (Float, expected.lower, expected.upper)
    assert sampled(domain) == sampled(expected)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        *(("2:4", {2, 3, 4}), ("uniform:2:4", {2, 3, 4}), ("log:1:3", {1, 2, 3}), ("q:32:96:32", {32, 64, 96})),
        *(("q:2:4:1", {2, 3, 4}), ("-1:1", {-1, 0, 1})),
    ],
)
def test_integer_ranges_include_both_ends(text: str, values: set[int]) -> None:
    domain = parse(text, int)
    assert isinstance(domain, Integer)
    assert set(sampled(domain)) == values
    assert np.median(sampled(parse("log:1:1000", int))) < 60, "it prefers small numbers"
    assert type(parse("1:2", int | float)) is Float
    assert type(parse("1:2", Annotated[Annotated[int, Field(gt=0)] | None, "x"])) is Integer


@pytest.mark.parametrize(
    ("name", "texts", "values"),
    [
        *(("hidden", "32,64,128", [32, 64, 128]), ("lr", "1e-3,1", [0.001, 1.0])),
        *(("activation", "relu,gelu", ["relu", "gelu"]), ("path", "a:b,c", ["a:b", "c"])),
        *(("with_bias", "true,no", [True, False]), ("dropout", "None,0.5", [None, 0.5]), ("label", "None,x", [None, "x"])),
        *(("run.workers", "1,1:4", [(1, 1), (1, 4)]), ("run.precision", "fp32,bf16", ["fp32", "bf16"])),
    ],
)
def test_each_value_is_read_as_its_field_reads_it(name: str, texts: str, values: list[Any]) -> None:
    domain = one(name, f"choice:{texts}")
    assert isinstance(domain, Categorical)
    assert [(type(value), value) for value in domain.categories] == [(type(value), value) for value in values]
    assert one(name, f"grid:{texts}") == tune.grid_search(values)
    assert one(name, texts.rpartition(",")[2]) == values[-1], "a plain value is a constant"


def test_a_space_keeps_its_names_and_their_order() -> None:
    space = parse_space({"run.global_batch": "choice:32,64", "lr": "log:1e-3:1", "path": "s3://bucket/a,b"}, Digits)
    assert (list(space), space["path"]) == (["run.global_batch", "lr", "path"], "s3://bucket/a,b")


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("lr", "log:0:1", "a logarithmic range begins above 0"),
        *(("lr", text, FINITE) for text in ("1:0", "1:1", "0:inf", "nan:1")),
        *(("lr", text, FORMS) for text in ("0:1:2", "log:1", "q:0:1", "lgo:0:1")),
        ("lr", "q:0:1:0", "the step of a range is above 0"),
        ("lr", "q:0:1:0.3", "both ends are multiples of the step 0.3"),
        *(("lr", text, A_NUMBER) for text in ("a:1", "choice:", "choice:1,,2")),
        *(("hidden", text, AN_INTEGER) for text in ("1:2.5", "choice:64,1.5")),
        ("hidden", "0:10", "input should be greater than 0"),
        *(("dropout", text, "input should be less than 1") for text in ("uniform:0:2", "q:0:1:0.5", "grid:0,1")),
        ("dropout", "-0.1:1", "input should be greater than or equal to 0"),
        ("activation", "choice:relu,tanh", "input should be 'relu' or 'gelu'"),
        ("with_bias", "0:1", "input should be a valid boolean, unable to interpret input"),
        *((name, "log:1:2", "only numbers have a range") for name in ("with_bias", "path")),
        ("run.workers", "choice:1:2,x", "is a whole number or a range min:max"),
        ("run.epochs", "0:3", "input should be greater than 0"),
    ],
)
def test_a_text_that_is_not_valid_is_refused_with_its_rule(name: str, text: str, rule: str) -> None:
    error = error_of(name, text)
    assert (error.where, error.value, error.rule) == (f"sweep.space.{name}", text, rule)
    assert error.fix


def test_an_end_that_is_never_sampled_need_not_be_valid() -> None:
    assert one("dropout", "0:1").upper == 1
    assert parse("log:0.5:1", Annotated[float, Field(gt=0.5, lt=1)]).lower == 0.5
    with pytest.raises(ConfigError, match=r"less than or equal to 0\.3"):
        parse("q:0:0.3:0.1", Annotated[float, Field(le=0.3)])  # 3 * 0.1 is above 0.3


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        *(("hiden", "did you mean sweep.space.hidden?"), ("run.global_bach", "did you mean sweep.space.run.global_batch?")),
        *(("global_batch", "did you mean sweep.space.run.global_batch?"), ("xyz", "see --help"), ("", "see --help")),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_one(name: str, fix: str) -> None:
    error = error_of(name, "0:1")
    assert (error.where, error.value, error.fix) == (f"sweep.space.{name}", "no such name", fix)
    assert "(lr, hidden, dropout, with_bias, activation, path, label)" in error.rule


class Adam(BaseModel):
    lr: float = 0.1
    momentum: float = Field(0.9, lt=1)


class Nested(Task):
    width: int = 8
    adam: Adam = Adam()


@pytest.mark.parametrize(
    ("task", "name", "fix"),
    [
        *((Nested, name, "did you mean sweep.space.adam.lr?") for name in ("adam.lrr", "adm.lr", "lr", "adam.run.lr")),
        *((Nested, name, "did you mean sweep.space.adam.momentum?") for name in ("adam.momentun", "momentum")),
        (Nested, "model.width", "did you mean sweep.space.width?"),
        (Digits, "optimizer.lr", "did you mean sweep.space.lr?"),
    ],
)
def test_a_mistake_in_a_nested_name_is_answered_with_the_nearest_field(task: type[Task], name: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_space({name: "0:1"}, task)
    assert caught.value.fix == fix


def test_fields_of_a_model_in_a_field_can_be_searched() -> None:
    space = parse_space({"adam.lr": "log:1e-3:1", "adam.momentum": "0.5"}, Nested)
    assert (type(space["adam.lr"]), space["adam.momentum"]) == (Float, 0.5)
    with pytest.raises(ConfigError, match=r"sweep\.space\.adam\.momentum\n.*\n.*less than 1"):
        parse_space({"adam.momentum": "1.5"}, Nested)
    for fixed, adam in (({}, Adam(lr=0.3)), ({"adam": {"momentum": "0.5"}}, Adam(lr=0.3, momentum=0.5))):
        task, _ = TrialTemplate.of(Nested, None, fixed).resolve({"adam.lr": 0.3, "width": 4})
        assert task.model_dump() == {"width": 4, "adam": adam.model_dump()}


def test_a_setting_of_the_whole_sweep_is_refused_with_the_reason() -> None:
    for name, reason in OF_THE_SWEEP.items():
        error = error_of(name, "choice:a,b")
        assert (error.where, error.rule) == (f"sweep.space.{name}", reason)
        assert error.fix == f"leave it out; {name} is given for the whole sweep"
    check_keys([f"run.{name}" for name in RunConfig.model_fields if f"run.{name}" not in OF_THE_SWEEP], [])


@pytest.mark.parametrize(
    ("names", "fields", "message"),
    [
        ([], ["width"], r"sweep\.space\n  value: empty"),
        *((["widht"], ["width", "depth"], r"did you mean sweep\.space\.width\?"), (["width"], [], "it has none")),
    ],
)
def test_names_are_checked(names: list[str], fields: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_keys(names, fields)


def test_a_mistake_is_reported_before_ray_tune_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    monkeypatch.delattr("ray.tune")
    assert error_of("lr", "log:0:1").value == "log:0:1"
    with pytest.raises(ImportError):
        one("lr", "log:1:2")


def test_an_example_has_a_value_for_each_kind_of_domain() -> None:
    before = np.random.get_state()[1].tolist()
    functions = {"half": tune.sample_from(lambda: 0.5), "twice": tune.sample_from(lambda config: config["lr"] * 2)}
    space = {**functions, "lr": tune.loguniform(0.01, 0.1), "grid": tune.grid_search([5, 6]), "constant": "x"}
    values = example(space)
    assert values.keys() == space.keys()
    assert (values["grid"], values["constant"], values["half"], values["twice"]) == (5, "x", 0.5, values["lr"] * 2)
    assert 0.01 <= values["lr"] <= 0.1
    assert np.random.get_state()[1].tolist() == before, "the program's own generator is not used"


def test_trials_are_counted_for_each_point_of_a_grid() -> None:
    assert num_trials({"lr": tune.uniform(0, 1)}, 4) == 4
    assert num_trials({"a": tune.grid_search([1, 2, 3]), "b": tune.grid_search([1, 2]), "c": 1}, 2) == 12
