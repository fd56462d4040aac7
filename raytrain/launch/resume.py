"""Does this run begin, go on, or end before it starts? Decided from run.json and the newest verified checkpoint.

run.json holds what the run's result depends on; a run that would go on under other settings is refused, and what
differs is named.
"""

from __future__ import annotations

import platform
from typing import Any

import ray
import torch

from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.errors import ResumeError
from raytrain.events.words import count_of
from raytrain.launch.work import Schedule, plan_facts
from raytrain.rundir import RUN, RunDir
from raytrain.task import Task
from raytrain.version import VERSION

RESULT_SETTINGS = ("micro_batch", "precision", "clip_norm")
"""Settings that alter the result besides those that are in the plan."""

PLAN_NAMES = {"num_rows": "rows of train", "chunk_rows": "chunks of train", "num_logical": "run.logical_workers"}
"""What a user calls the parts of a plan; the others are settings of the same name."""


def describe(task: Task, config: RunConfig, work: Schedule) -> dict[str, Any]:
    """The content of run.json: everything that the result depends on, and with which versions it was made."""
    return {
        "format": 1,
        "task": {"name": type(task).__name__, "fields": task.model_dump(mode="json")},
        "run": config.model_dump(mode="json"),
        "num_steps": work.num_steps,
        "plan": plan_facts(work.train),
        "data": {name: source.fingerprint() for name, source in work.sources.items()},
        "versions": {
            "raytrain": VERSION,
            "torch": torch.__version__,
            "ray": ray.__version__,
            "python": platform.python_version(),
        },
    }


def earlier_facts(run_dir: RunDir, mode: str) -> dict[str, Any] | None:
    """The content of run.json, or None for a run that begins.

    Args:
        mode: auto, new or must.

    Raises:
        ResumeError: the mode does not allow what is there, or it cannot be read.
    """
    exists = run_dir.exists(RUN)
    if mode == "new" and exists:
        raise ResumeError("run.resume", "new", f"there is no run at {run_dir.path} yet", "choose another run.name")
    if mode == "must" and not exists:
        raise ResumeError("run.resume", "must", f"there is a run at {run_dir.path}", "check run.name and run.storage")
    if not exists:
        return None
    try:
        facts: dict[str, Any] = run_dir.read_json(RUN)
    except ValueError as error:
        raise ResumeError(run_dir.child(RUN), error, "is the JSON of a run", "choose another run.name") from error
    return facts


def with_logical_workers(config: RunConfig, before: dict[str, Any] | None) -> RunConfig:
    """The settings with the logical workers of the run that goes on, where they do not say how many.

    Args:
        before: of `earlier_facts`.

    Raises:
        ResumeError: there are more workers than logical workers.
    """
    if before is None or config.logical_workers is not None:
        return config
    num_logical: int = before["plan"]["num_logical"]
    if config.max_workers > num_logical:
        raise ResumeError(
            "run.workers",
            ":".join(map(str, config.workers)),
            f"at most {count_of(num_logical, 'worker')}, since the run was begun with that many logical workers",
            f"lower run.workers, or choose another run.name with run.logical_workers = {config.max_workers}",
        )
    return RunConfig(**config.model_dump() | {"logical_workers": num_logical})


def check_same(run_dir: RunDir, before: dict[str, Any] | None, facts: dict[str, Any], fewest_steps: int | None) -> None:
    """Compares a run that is there with the one that is asked for.

    Args:
        before: of `earlier_facts`.
        facts: of `describe`, for this start.
        fewest_steps: as many may be asked for, or more, without altering what is done; None if no other number may be,
            since a schedule depends on it.

    Raises:
        ResumeError: something that alters the result differs.
    """
    if before is not None and (differences := list_differences(before, facts, fewest_steps)):
        raise ResumeError(
            f"run {run_dir.path}",
            "\n         ".join(differences),
            "a run goes on with the settings and data that its result depends on",
            "set them back, or choose another run.name",
        )


def list_differences(before: dict[str, Any], now: dict[str, Any], fewest_steps: int | None) -> list[str]:
    """What alters the result and differs, as "name: before -> now"; `fewest_steps` as in `check_same`."""
    parts = [
        ("task", before["task"]["name"], now["task"]["name"]),
        ("task", before["task"]["fields"], now["task"]["fields"]),
        ("data", before["data"], now["data"]),
        *((PLAN_NAMES.get(name, f"run.{name}"), before["plan"].get(name), now["plan"][name]) for name in now["plan"]),
        *(("run." + name, before["run"].get(name), now["run"].get(name)) for name in RESULT_SETTINGS),
    ]
    if fewest_steps is None or now["num_steps"] < fewest_steps:
        parts.append(("number of steps", before["num_steps"], now["num_steps"]))
    return [line for name, old, new in parts for line in differences(name, old, new)]


def newest_step(run_dir: RunDir) -> int:
    """Finished steps of the newest verified checkpoint, 0 where there is none."""
    checkpoint = CheckpointStore(run_dir).newest_verified()
    return checkpoint.step if checkpoint else 0


def differences(name: str, old: Any, new: Any) -> list[str]:
    """What differs between two plain values, as "name.key: before -> now"."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [line for key in keys for line in differences(f"{name}.{key}", old.get(key), new.get(key))]
    return [] if old == new else [f"{name}: {_short(old)} -> {_short(new)}"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
