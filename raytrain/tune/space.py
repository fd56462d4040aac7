"""What is the search space of a sweep, and how is it written as text?

Parses texts such as `log:1e-3:1` into domains of Ray Tune, validates each value as the task's field or the run's setting
does, and checks the names. Does not choose the values of trials. Ray Tune is imported only when a domain is made.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from raytrain.config import Invalid, RunConfig, unknown_name
from raytrain.errors import ConfigError
from raytrain.task import Task

PREFIX = "sweep.space."
"""Of a name in errors."""
OF_THE_SWEEP = {
    "run.name": "each trial has its own name, below that of the sweep",
    "run.storage": "each trial has its own directory, below that of the sweep",
    "run.resume": "each trial has its own state, and resumes with the sweep",
    "run.best": "all trials are compared by the same metric",
}
"""Settings of a run that cannot be searched, and why."""
RANGES = {"log": 2, "uniform": 2, "q": 3}
"""Forms of ranges, and how many numbers each takes."""
OTHER_FORMS = "give other values, as choice:A,B, grid:A,B or one value"
NUMBER_FORMS = "give other values, as log:LOW:HIGH, LOW:HIGH, q:LOW:HIGH:STEP, choice:A,B, grid:A,B or one value"


def parse_space(texts: Mapping[str, str], task: type[Task]) -> dict[str, Any]:
    """A space for Ray Tune from its texts.

    Args:
        texts: by the name of a field of the task ("lr", or "adam.lr" in a model) or of a setting ("run.global_batch").
        task: the task's class.

    Raises:
        ConfigError: a name is unknown or not allowed, a text is not valid, or the space is empty.
    """
    own = fields_of(task)
    check_keys(texts, own)
    fields = {**own, **{f"run.{name}": field for name, field in RunConfig.model_fields.items()}}
    return {name: parse(text, Annotated[fields[name].annotation, fields[name]], name) for name, text in texts.items()}


def fields_of(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """The fields of a model by name, and those of models in its fields as "adam.lr"."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        found[prefix + name] = field
        kind = kinds_of(field.annotation)[0]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= fields_of(kind, f"{prefix}{name}.")
    return found


def check_keys(names: Collection[str], fields: Collection[str]) -> None:
    """Checks the names of a space.

    Args:
        names: of the space.
        fields: names of the task's fields, or of the parameters of the function that makes the task.

    Raises:
        ConfigError: a name is unknown or not allowed, or the space is empty.
    """
    if not names:
        rule = "a sweep varies at least one field of the task or setting of the run"
        raise ConfigError(PREFIX.rstrip("."), "empty", rule, "for example lr, as tune.loguniform(1e-3, 1)")
    settings = [f"run.{name}" for name in RunConfig.model_fields]
    known = [name for name in (*fields, *settings) if name not in OF_THE_SWEEP]
    for name in names:
        if reason := OF_THE_SWEEP.get(name):
            raise ConfigError(PREFIX + name, "in the space", reason, f"leave it out; {name} is given for the whole sweep")
        if name not in known:
            rule = f"is a field of the task ({', '.join(fields) or 'it has none'}), or a setting of the run, after 'run.'"
            error = unknown_name(name, known, rule)
            fix = error.fix.replace("did you mean ", f"did you mean {PREFIX}")
            raise ConfigError(PREFIX + name, error.value, error.rule, fix)


def parse(text: str, kind: Any, name: str = "NAME") -> Any:
    """Parses one text into a domain of Ray Tune, or into a constant.

    `log:1e-3:1` and `uniform:0:1` (or `0:1`) are ranges, `q:0:1:0.1` the multiples of 0.1 in one. An integer range includes
    its upper end, unlike in Ray Tune. `choice:32,64` samples one of the values, `grid:32,64` is a grid search.

    Args:
        text: as typed by the user.
        kind: the type of the values, with its constraints if it is `Annotated`.
        name: of the hyperparameter, for errors.

    Raises:
        ConfigError: the text has none of the forms, or a value is not valid for `kind`.
    """
    form, colon, rest = text.partition(":")
    try:
        if colon and form in ("choice", "grid"):
            return _listed(form, [_value(word, kind) for word in rest.split(",")])
        if colon and form in RANGES:
            return _range(form, rest, kind)
        if colon and _number(kind):
            return _range("uniform", text, kind)
        return _value(text, kind)
    except Invalid as error:
        raise ConfigError(PREFIX + name, text, error.rule, error.fix) from None


def kinds_of(annotation: Any) -> list[Any]:
    """The types that an annotation allows, except None: `float | None` -> [float]."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kinds_of(args[0])
    if origin in (Union, UnionType):
        return [kind for arg in args if arg is not NoneType for kind in kinds_of(arg)]
    return [annotation]


def _number(kind: Any) -> type[int] | type[float] | None:
    """The type of the numbers in a range; None if values of `kind` have no ranges."""
    kinds = kinds_of(kind)
    if not all(one in (int, float) for one in kinds):
        return None
    return float if float in kinds else int


def _value(value: Any, kind: Any) -> Any:
    if value == "None" and _takes_none(kind):
        return None
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, Invalid):
            raise cause from None
        fix = NUMBER_FORMS if _number(kind) else OTHER_FORMS
        raise Invalid(f"{first['msg'][0].lower()}{first['msg'][1:]}", fix) from None


def _takes_none(kind: Any) -> bool:
    inner = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return NoneType in get_args(inner)


def _listed(form: str, values: list[Any]) -> Any:
    from ray import tune

    return tune.choice(values) if form == "choice" else tune.grid_search(values)


def _range(form: str, numbers: str, kind: Any) -> Any:
    """The domain of a range, whose ends are valid for `kind`."""
    number, words = _number(kind), numbers.split(":")
    if number is None:
        raise Invalid("only numbers have a range", OTHER_FORMS)
    if len(words) != RANGES[form]:
        raise Invalid("a range is LOW:HIGH, log:LOW:HIGH or q:LOW:HIGH:STEP", "for example 0:1, log:1e-3:1 or q:0:1:0.1")
    low, high, *steps = (_value(word, number) for word in words)
    _check_range(form, low, high, *steps)
    for end in _extremes(low, high, number, *steps):
        _value(end, kind)
    return _domain(form, low, high, number, *steps)


def _check_range(form: str, low: float, high: float, step: float | None = None) -> None:
    if not -math.inf < low < high < math.inf:
        raise Invalid("the ends of a range are two finite numbers, the smaller one first", "for example 0:1")
    if form == "log" and low <= 0:
        raise Invalid("a logarithmic range begins above 0", "raise its lower end, or write uniform")
    if step is None:
        return
    if not 0 < step < math.inf:
        raise Invalid("the step of a range is above 0", "for example q:0:1:0.1")
    if not all(math.isclose(end / step, round(end / step)) for end in (low, high)):
        raise Invalid(f"both ends are multiples of the step {step:g}", "move the ends, or choose another step")


def _extremes(low: float, high: float, number: type, step: float | None = None) -> tuple[float, float]:
    """The smallest and the largest number that is sampled; a float range practically never samples its ends."""
    if number is int:
        return low, high
    if step is not None:
        return round(low / step) * step, round(high / step) * step
    return math.nextafter(low, high), math.nextafter(high, low)


def _domain(form: str, low: Any, high: Any, number: type, step: Any = None) -> Any:
    from ray import tune

    if number is float and step is not None:
        return tune.quniform(low, high, step)
    if number is float:
        return tune.loguniform(low, high) if form == "log" else tune.uniform(low, high)
    if step is not None and step > 1:  # a step of 1 would leave the upper end out
        return tune.qrandint(low, high, step)
    return tune.lograndint(low, high + 1) if form == "log" else tune.randint(low, high + 1)


def grid_of(domain: Any) -> list[Any] | None:
    """The values of a grid search; None for anything else."""
    return list(domain["grid_search"]) if isinstance(domain, dict) and set(domain) == {"grid_search"} else None


def num_trials(space: Mapping[str, Any], samples: int) -> int:
    """The number of trials: `samples` for each point of the grid."""
    return samples * math.prod(len(grid) for domain in space.values() if (grid := grid_of(domain)) is not None)


def example(space: Mapping[str, Any]) -> dict[str, Any]:
    """Values that a trial could have."""
    from ray.tune.search.sample import Domain, Function

    values: dict[str, Any] = {}
    for name, domain in space.items():
        if (grid := grid_of(domain)) is not None:
            values[name] = grid[0]
        elif not isinstance(domain, Function):
            values[name] = domain.sample(random_state=0) if isinstance(domain, Domain) else domain
    functions = {name: domain for name, domain in space.items() if isinstance(domain, Function)}
    for name, domain in functions.items():  # of the other values
        values[name] = domain.sample(config=dict(values))
    return values
