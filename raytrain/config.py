"""The settings of a run: one frozen object, validated the same way from Python and from the command line.

Nothing here looks at the machine or the cluster; whether the settings can be met is found out in `launch`.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from raytrain.errors import ConfigError
from raytrain.units import parse_range


def _read_range(value: Any) -> Any:
    """Accepts 4, "4", "1:8" and (1, 8)."""
    if isinstance(value, (list, tuple)) and len(value) == 1:  # what a command line makes of one word for a tuple
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
        where, value: where several settings do not fit together, the one to look at first.
    """

    def __init__(self, rule: str, fix: str, where: str = "", value: object = "") -> None:
        super().__init__(rule, fix)
        self.rule, self.fix, self.where, self.value = rule, fix, where, value


WorkerRange = Annotated[tuple[int, int], BeforeValidator(_read_range)]


class RunConfig(BaseModel):
    """How a task is run: where, how long, on how many workers, with which batch."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = ""
    """Name of the run and of its directory below the storage; by default the task's name."""
    storage: str = "./runs"
    """Where runs are kept: a directory that all nodes share, or a URI such as s3://bucket/path."""
    resume: Literal["auto", "new", "must"] = "auto"
    """auto: go on if the run exists; new: refuse if it exists; must: refuse if it does not exist."""

    workers: WorkerRange = (1, 1)
    """Worker processes: a number, or a range min:max in which the run grows and shrinks with the cluster."""
    logical_workers: int | None = Field(None, gt=0)
    """Equal shares of the global batch; part of the result, unlike workers. Default: the largest number of workers."""
    elasticity: Literal["auto", "in_place", "restart"] = "auto"
    """in_place: the rest trains on; restart: each change restarts all from a checkpoint; auto: what this Ray allows."""
    global_batch: int = Field(64, gt=0)
    """Rows per optimizer step, over all workers."""
    micro_batch: int | None = Field(None, gt=0)
    """Most rows in one forward and backward pass. Default: the share of a logical worker."""
    epochs: int | None = Field(None, gt=0)
    """Passes over the training data. Give epochs or steps; default: one epoch."""
    steps: int | None = Field(None, gt=0)
    """Optimizer steps, instead of epochs."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights, the order of the rows, and the random numbers of each step."""
    shuffle_window: int = Field(4, gt=0)
    """Chunks (Parquet row groups) whose rows are shuffled together; in-memory data are shuffled as a whole."""
    drop_last: bool = False
    """Leave out the last step of an epoch if it is short of rows."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Number format of the forward pass; bf16 uses autocast, weights stay fp32."""
    exactness: Literal["default", "bitwise"] = "default"
    """bitwise: weights are equal to the last bit for any number of workers; default: up to the order of sums."""
    clip_norm: float | None = Field(None, gt=0)
    """Largest L2 norm of the global gradient; larger ones are scaled down to it."""
    find_unused_parameters: bool = False
    """Let some parameters have no gradient in some passes (costs time in each step)."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """auto: one GPU per worker if the cluster has any, else CPU."""
    cpus_per_worker: float = Field(1.0, gt=0)
    """CPUs that Ray reserves for each worker."""
    threads_per_worker: int | None = Field(None, gt=0)
    """Threads of PyTorch in each worker. Default: the CPUs of a worker, at least 1."""
    forward_env: tuple[str, ...] = ()
    """Environment variables that workers take over from the driver, besides those of NCCL, gloo, PyTorch and OpenMP."""

    checkpoint_every: int | None = Field(None, gt=0)
    """Steps between checkpoints. Default: one at the end of each epoch. The last step is always saved."""
    keep_newest: int = Field(2, gt=0)
    """Newest checkpoints to keep."""
    keep_best: int = Field(1, ge=0)
    """Best checkpoints to keep besides, by the metric `best`."""
    best: str = "min:valid/loss"
    """What is best: min:metric or max:metric, for example max:valid/accuracy."""
    eval_every: int | None = Field(None, gt=0)
    """Steps between evaluations. Default: one at the end of each epoch."""

    max_failures: int = Field(8, ge=0)
    """Workers that may be lost in a row without a finished step in between, before the run gives up."""
    start_timeout_s: float = Field(60.0, gt=0)
    """Seconds to wait for the resources of the smallest number of workers, before there ever were enough."""
    wait_timeout_s: float = Field(1800.0, gt=0)
    """Seconds for which too few workers wait for more, with the state in memory, before they save it and end the run."""
    heartbeat_timeout_s: float = Field(10.0, gt=0)
    """Seconds without a heartbeat after which a worker is taken for dead, and killed."""
    hang_timeout_s: float = Field(25.0, gt=0)
    """Seconds that a worker may spend in one call of the task's code, once it has finished a step, before it is killed."""
    slow_timeout_s: float = Field(600.0, gt=0)
    """Seconds for what may be slow: a worker's start, its first pass (compilation), reading data."""
    collective_timeout_s: float = Field(20.0, gt=0)
    """Seconds for which a worker waits for its peers in a step before it re-forms the group; doubled after a false alarm."""
    stop_grace_s: float = Field(2.5, gt=0)
    """Seconds that a stop (Ctrl-C, SIGTERM) may take to finish the step and save."""
    audit: bool = False
    """Record which rows each step trained on, for `raytrain audit`."""
    digest: str = ""
    """Record digests of weights and optimizer, for `raytrain compare`: off, checkpoints (at each checkpoint), or every:N
    (at each Nth step). Default: checkpoints with run.exactness bitwise, otherwise off."""

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise explain(error, type(self), prefix="run.") from None

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
    def num_threads(self) -> int:
        """Threads of PyTorch in each worker."""
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
        """Steps between two digests; 0 if they go with the checkpoints, None if there are to be none."""
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
        mode, colon, metric = best.partition(":")
        if mode not in ("min", "max") or not colon or not metric:
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


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> ConfigError:
    """The first mistake of a pydantic error as a four-part error.

    Args:
        error: what pydantic found.
        model: the model whose field names are offered for an unknown one.
        prefix: put before the field's name, "run." for the settings of a run.
    """
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    if path and path[0] == "run":
        path, prefix, model = path[1:], "run.", RunConfig
    where = prefix + ".".join(path[:1]) if path else prefix.rstrip(".") or model.__name__
    value = first["input"] if path else ""
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):  # settings inside other settings have explained themselves already
        return cause
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
    """The error for a name that does not exist, with the nearest one that does; `rule` stands for a long list."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    rule = rule or "is one of " + ", ".join(known)
    return ConfigError(name, "no such name", rule, f"did you mean {near[0]}?" if near else "see --help")


def _show(value: object) -> str:
    return ":".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
