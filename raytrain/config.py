"""The settings of a run: one frozen object, validated in the same way from Python and from the command line.

Also `Settings`, the base of everything that a user configures: its errors have four parts. Nothing here looks at the
machine or the cluster; `launch` checks whether the settings can be met.
"""

from __future__ import annotations

import difflib
import inspect
import re
import textwrap
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from raytrain.errors import ConfigError
from raytrain.units import parse_range


def _read_range(value: Any) -> Any:
    """Accepts 4, "4", "1:8" and (1, 8)."""
    if isinstance(value, (list, tuple)) and len(value) == 1:  # one word of a command line
        value = value[0]
    if isinstance(value, int):
        return (value, value)
    if isinstance(value, str):
        try:
            return parse_range(value)
        except ValueError:
            raise Invalid("is a whole number or a range min:max", "for example 4 or 1:8") from None
    return value


class Invalid(ValueError):
    """Raised in a validator: the rule that the value breaks, and the fix.

    Args:
        where, value: if several settings contradict each other, the one to look at first.
    """

    def __init__(self, rule: str, fix: str, where: str = "", value: object = "") -> None:
        super().__init__(rule, fix)
        self.rule, self.fix, self.where, self.value = rule, fix, where, value


WorkerRange = Annotated[tuple[int, int], BeforeValidator(_read_range)]


class Settings(BaseModel):
    """Base of settings that a user writes: frozen, without unknown names, with errors in four parts.

    Raises:
        ConfigError: a name is unknown, or a value is wrong.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    _prefix: ClassVar[str] = ""
    """Before a field's name in errors: "run." for the settings of a run."""

    if not TYPE_CHECKING:  # type checkers and editors see the fields as keywords

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise explain(error, type(self), self._prefix) from None


SettingsType = TypeVar("SettingsType", bound=Settings)


def with_fields_in_help(model: type[SettingsType]) -> type[SettingsType]:
    """Class decorator: appends each field's type, default and meaning to the docstring, for `help()`."""
    lines = [inspect.cleandoc(model.__doc__ or ""), "", "Args:"]
    for name, field in model.model_fields.items():
        kind = re.sub(
            r"typing\.|Annotated\[(.*?), BeforeValidator\(.*\)\]", r"\1", inspect.formatannotation(field.annotation)
        )
        lines.append(f"    {name} ({kind}, default {field.get_default()!r}):")
        lines += textwrap.wrap(field.description or "", 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    model.__doc__ = "\n".join(lines)
    return model


@with_fields_in_help
class RunConfig(Settings):
    """How to run a task: storage, number of workers, batch size, length, precision, checkpoints, fault tolerance."""

    _prefix: ClassVar[str] = "run."

    name: str = ""
    """Name of the run and of its directory in the storage. Default: the task's name."""
    storage: str = "./runs"
    """Parent directory of runs: a path that all nodes share, or a URI such as s3://bucket/path."""
    resume: Literal["auto", "new", "must"] = "auto"
    """auto: resume the run if it exists; new: fail if it exists; must: fail if it does not exist."""

    workers: WorkerRange = (1, 1)
    """Worker processes: a number, or a range min:max within which the run grows and shrinks with the cluster."""
    logical_workers: int | None = Field(default=None, gt=0)
    """Equal parts of the global batch; unlike workers, they affect the result. Default: the largest number of workers."""
    elasticity: Literal["auto", "in_place", "restart"] = "auto"
    """in_place: surviving workers keep training; restart: each change restarts all workers from a checkpoint; auto: in_place
    if this Ray version supports it."""
    global_batch: int = Field(default=64, gt=0)
    """Rows per optimizer step, over all workers."""
    micro_batch: int | None = Field(default=None, gt=0)
    """Maximum rows per forward and backward pass. Default: the batch of a logical worker."""
    epochs: int | None = Field(default=None, gt=0)
    """Passes over the training data. Set epochs or steps; default: one epoch."""
    steps: int | None = Field(default=None, gt=0)
    """Optimizer steps, instead of epochs."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the initial weights, the row order, and the random numbers of each step."""
    shuffle_window: int = Field(default=4, gt=0)
    """Chunks (Parquet row groups) whose rows are shuffled together; in-memory data is shuffled as a whole."""
    drop_last: bool = False
    """Drop the last step of an epoch if it has fewer rows than the global batch."""

    reader: Literal["auto", "ray", "local"] = "auto"
    """What reads the rows. ray: processes of Ray Data, on any node; local: threads of the worker; auto: Ray Data where rows
    are computed (`transform`, `__getitem__` of a dataset, images), else the worker. Rows and result are the same."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Number format of the forward pass; bf16 uses autocast, weights stay fp32."""
    exactness: Literal["default", "bitwise"] = "default"
    """bitwise: weights are bit-identical for any number of workers; default: equal up to the order of sums."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Maximum L2 norm of the global gradient; larger gradients are scaled down to it. Default: no clipping."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Keep an exponential moving average of the weights with this decay per step; it is evaluated as <source>/ema/<metric>
    and saved as ema.safetensors. Default: none."""
    compile: bool = False
    """Compile the model with torch.compile, once per worker process."""
    find_unused_parameters: bool = False
    """Allow steps in which some parameters get no gradient: gradients are then reduced after the backward pass, not during
    it. A parameter that no row of a step uses has no gradient in it, as in one process."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """auto: one GPU per worker if the cluster has any, otherwise CPU."""
    cpus_per_worker: float = Field(default=1.0, gt=0)
    """CPUs that Ray reserves for each worker."""
    threads_per_worker: int | None = Field(default=None, gt=0)
    """PyTorch threads per worker. Default: cpus_per_worker, at least 1."""
    spares: int = Field(default=0, ge=0)
    """Workers beyond the largest number that wait with their model built, and take the place of a lost worker at once; each
    needs the resources of a worker. Not with restart mode or in sweeps."""
    fork_workers: bool = True
    """Fork each worker from a process on its node that has imported PyTorch, so that it starts in a fraction of the time. If
    off, or where the job's runtime_env decides which Python runs, each worker imports it itself."""
    forward_env: tuple[str, ...] = ()
    """Environment variables that the driver passes on to workers, in addition to those of NCCL, gloo, PyTorch and OpenMP."""

    checkpoint_every: int | None = Field(default=None, gt=0)
    """Steps between checkpoints. Default: one at the end of each epoch. The last step is always saved."""
    keep_newest: int = Field(default=2, gt=0)
    """Number of newest checkpoints to keep."""
    keep_best: int = Field(default=1, ge=0)
    """Number of best checkpoints to keep in addition, by the metric `best`."""
    best: str = "min:valid/loss"
    """Metric that defines the best checkpoint: min:metric or max:metric, for example max:valid/accuracy."""
    eval_every: int | None = Field(default=None, gt=0)
    """Steps between evaluations. Default: one at the end of each epoch."""

    max_skipped: int = Field(default=20, gt=0)
    """Steps in a row that are skipped because loss or gradient is not finite, after which the run fails. A run of which no
    step was applied fails at its end."""
    max_failures: int = Field(default=8, ge=0)
    """Failures in a row, without a finished step in between, that the run survives; losses at one moment are one failure."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds to wait at the start for the resources of the smallest number of workers."""
    wait_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds for which too few workers wait for new ones, with the state in memory, before they save it and stop."""
    heartbeat_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds without a sign of life, from a worker or its process, after which it is considered dead and killed."""
    hang_timeout_s: float = Field(default=25.0, gt=0)
    """Seconds that one call of the task's code may take before the worker is killed; slow_timeout_s for its first call with
    tensors of some shapes, which may compile."""
    slow_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for slow operations: starting a worker, a first pass (compilation), reading the data of a step, handing over
    the state, saving; and without progress while a checkpoint is restored."""
    collective_timeout_s: float = Field(default=20.0, gt=0)
    """Seconds for which all workers may wait for each other at once, so that nothing explains it, before they re-form their
    group; doubled each time in a row. A worker that is busy is waited for."""
    stop_grace_s: float = Field(default=2.5, gt=0)
    """Seconds to finish the step and save it after Ctrl-C or SIGTERM."""
    audit: bool = False
    """Record the rows that each step trained on, for `raytrain audit`."""
    digest: str = ""
    """When to record digests of weights and optimizer, for `raytrain compare`: off, checkpoints (with each checkpoint),
    or every:N (every N steps). Default: checkpoints if run.exactness is bitwise, otherwise off."""

    @property
    def min_workers(self) -> int:
        return self.workers[0]

    @property
    def max_workers(self) -> int:
        return self.workers[1]

    @property
    def num_logical(self) -> int:
        return self.logical_workers or self.max_workers

    @property
    def best_mode(self) -> str:
        """ "min" or "max"."""
        return parse_best(self.best)[0]

    @property
    def best_metric(self) -> str:
        return parse_best(self.best)[1]

    @property
    def num_threads(self) -> int:
        """PyTorch threads per worker."""
        return self.threads_per_worker or max(1, int(self.cpus_per_worker))

    @field_validator("name")
    @classmethod
    def _name_stays_below_the_storage(cls, name: str) -> str:
        if name in (".", "..") or any(c in name for c in "/\\\0\n"):
            raise Invalid("is one plain directory name, without '/' or '..'", "choose a name like digits-lr0.1")
        return name

    @field_validator("workers")
    @classmethod
    def _workers_are_a_range(cls, workers: tuple[int, int]) -> tuple[int, int]:
        low, high = workers
        if low < 1:
            raise Invalid("at least 1 worker", "give a number such as 2, or a range such as 1:8")
        if low > high:
            raise Invalid("the smallest number comes first", f"write {high}:{low}")
        return workers

    @property
    def digest_every(self) -> int | None:
        """Steps between two digests; 0: with each checkpoint; None: no digests."""
        how = self.digest or ("checkpoints" if self.exactness == "bitwise" else "off")
        return {"off": None, "checkpoints": 0}[how] if ":" not in how else int(how.partition(":")[2])

    @field_validator("digest")
    @classmethod
    def _digest_says_when(cls, digest: str) -> str:
        if digest and digest not in ("off", "checkpoints") and not re.fullmatch(r"every:[1-9]\d{0,8}", digest, re.ASCII):
            raise Invalid("is off, checkpoints, or every:N", "for example every:100")
        return digest

    @field_validator("best")
    @classmethod
    def _best_names_a_direction(cls, best: str) -> str:
        mode, metric = parse_best(best)
        if mode not in ("min", "max") or not metric:
            raise Invalid("is min:metric or max:metric", "for example max:valid/accuracy")
        return best

    @model_validator(mode="after")
    def _settings_fit_together(self) -> RunConfig:
        if self.epochs and self.steps:
            value = f"{self.steps}, and run.epochs = {self.epochs}"
            raise Invalid("epochs or steps, not both", "leave one of them out", "steps", value)
        if self.max_workers > self.num_logical:
            raise Invalid(
                f"at most run.logical_workers = {self.num_logical} workers, since each needs a share of the batch",
                f"raise run.logical_workers to {self.max_workers}, or lower run.workers",
                *("workers", self.workers),
            )
        if self.global_batch < self.num_logical:
            raise Invalid(
                f"at least one row for each of {self.num_logical} logical workers",
                f"raise run.global_batch to {self.num_logical}, or lower run.logical_workers or run.workers",
                *("global_batch", self.global_batch),
            )
        return self


def parse_best(best: str) -> tuple[str, str]:
    """Mode and metric of `run.best`: "max:valid/accuracy" -> ("max", "valid/accuracy")."""
    mode, _, metric = best.partition(":")
    return mode, metric


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> ConfigError:
    """The first error that pydantic found, in four parts.

    Args:
        error: raised by pydantic.
        model: whose field names are suggested for an unknown one.
        prefix: before the field's name, "run." for the settings of a run.
    """
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    where = prefix + path[0] if path else prefix.rstrip(".") or model.__name__
    value = first["input"] if path else ""
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, Invalid):
        if cause.where:
            where, value = prefix + cause.where, cause.value
        return ConfigError(where, _show(value), cause.rule, cause.fix)
    if first["type"] == "extra_forbidden":
        return unknown_name(where, [prefix + name for name in model.model_fields])
    field = model.model_fields.get(path[0]) if path else None
    meaning = f"it means: {field.description}" if field and field.description else f"see the documentation of {where}"
    return ConfigError(where, _show(value), first["msg"][0].lower() + first["msg"][1:], f"give another value; {meaning}")


def unknown_name(name: str, known: list[str], rule: str = "") -> ConfigError:
    """The error for an unknown name, with the nearest known one; `rule` replaces the list of known names."""
    near = max(known, key=lambda one: _likeness(name, one), default="")
    rule = rule or "is one of " + ", ".join(known)
    is_near = _likeness(name, near) >= 0.5
    return ConfigError(name, "no such name", rule, f"did you mean {near}?" if is_near else "see --help")


def _likeness(name: str, other: str) -> float:
    """From 0 to 1. The last part of a dotted name may count as much as the whole: a prefix may be missing or too much."""
    if not name or not other:
        return 0.0
    whole = difflib.SequenceMatcher(None, name, other).ratio()
    last, other_last = (one.lstrip("-").rpartition(".")[2] for one in (name, other))
    return max(whole, (whole + difflib.SequenceMatcher(None, last, other_last).ratio()) / 2)


def _show(value: object) -> str:
    return ":".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
