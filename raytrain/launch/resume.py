"""Is this run new, resumed, or already complete? Decided from run.json and the newest verified checkpoint.

run.json contains everything that the result depends on, and so does the manifest of each checkpoint. A resume with other
settings or data is refused, and the differences are named. Restores no state: that is done by the workers. Runs in the
driver, before Ray starts.
"""

from __future__ import annotations

import platform
from typing import Any

import ray
import torch

from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.errors import ResumeError, StorageError, differences
from raytrain.events.kinds import CheckpointSaved
from raytrain.events.log import read
from raytrain.events.messages import count_of
from raytrain.launch.schedule import Schedule, plan_to_json
from raytrain.rundir import CHECKPOINTS, RUN, RunDir
from raytrain.task import Task
from raytrain.version import VERSION

RESULT_SETTINGS = ("micro_batch", "precision", "clip_norm")
"""Settings that change the result, besides those of the plan."""

MISSING = "not there"
"""What is wrong with a run.json that does not exist."""
FACTS = ("format", "task", "run", "num_steps", "plan", "data", "versions")
"""Keys of run.json."""
PLAN_NAMES = {"num_rows": "rows of train", "chunk_rows": "chunks of train", "num_logical": "run.logical_workers"}
"""Display names of plan fields; the others are settings of the same name."""


def run_metadata(task: Task, config: RunConfig, schedule: Schedule) -> dict[str, Any]:
    """The content of run.json: everything that the result depends on, and the versions of the software."""
    return {
        "format": 1,
        "task": {"name": type(task).__name__, "fields": task.model_dump(mode="json")},
        "run": config.model_dump(mode="json"),
        "num_steps": schedule.num_steps,
        "plan": plan_to_json(schedule.train),
        "data": {name: source.fingerprint() for name, source in schedule.sources.items()},
        "versions": {
            "raytrain": VERSION,
            "torch": torch.__version__,
            "ray": ray.__version__,
            "python": platform.python_version(),
        },
    }


def read_metadata(run_dir: RunDir, mode: str) -> dict[str, Any] | None:
    """The content of run.json, or None for a new run. If the file is damaged or gone, a manifest has the same content.

    Args:
        mode: `run.resume`: auto, new or must.

    Raises:
        ResumeError: the mode does not allow this, or neither run.json nor a manifest is valid.
    """
    checkpoints = CheckpointStore(run_dir).list()
    metadata, damage = _read_run_json(run_dir)
    exists = bool(checkpoints) or damage != MISSING
    if mode == "new" and exists:
        raise ResumeError("run.resume", "new", f"there is no run at {run_dir.path} yet", "choose another run.name")
    if mode == "must" and not exists:
        raise ResumeError("run.resume", "must", f"there is a run at {run_dir.path}", "check run.name and run.storage")
    if not exists:
        return None
    found = [metadata, *(checkpoint.manifest.run for checkpoint in reversed(checkpoints))]
    valid = next((facts for facts in found if all(name in facts for name in FACTS)), None)
    if valid is None:
        raise ResumeError(run_dir.child(RUN), damage, "is the JSON of a run", "restore it, or choose another run.name")
    return {name: valid[name] for name in FACTS}


def write_metadata(run_dir: RunDir, metadata: dict[str, Any]) -> None:
    """Writes run.json. Raises StorageError if the storage fails."""
    try:
        run_dir.write_json(metadata, RUN)
    except OSError as error:
        raise _failed(run_dir, "written", error) from error


def _failed(run_dir: RunDir, action: str, error: OSError) -> StorageError:
    rule = f"the run's storage can be {action}"
    return StorageError(run_dir.child(RUN), error, rule, "check the storage and start again")


def _read_run_json(run_dir: RunDir) -> tuple[dict[str, Any], str]:
    """The content of run.json, and what is wrong with it if it is not that of a run."""
    try:
        found = run_dir.read_json(RUN)
    except FileNotFoundError:
        return {}, MISSING
    except ValueError as error:
        return {}, str(error)
    except OSError as error:
        raise _failed(run_dir, "read", error) from error
    missing = [name for name in FACTS if not isinstance(found, dict) or name not in found]
    return ({}, f"without {', '.join(missing)}") if missing else (found, "")


def complete_settings(config: RunConfig, name: str, storage: str, before: dict[str, Any] | None) -> RunConfig:
    """The settings of the run, with the default name, the absolute storage, and the logical workers of a resumed run.

    Args:
        before: of `read_metadata`.

    Raises:
        ResumeError: there are more workers than logical workers.
    """
    num_logical = config.logical_workers
    if before is not None and num_logical is None:
        num_logical = int(before["plan"]["num_logical"])
        if config.max_workers > num_logical:
            raise ResumeError(
                "run.workers",
                ":".join(map(str, config.workers)),
                f"at most {count_of(num_logical, 'worker')}, because the run started with that many logical workers",
                f"lower run.workers, or choose another run.name with run.logical_workers = {config.max_workers}",
            )
    return RunConfig(**config.model_dump() | {"name": name, "storage": storage, "logical_workers": num_logical})


def check_resumable(run_dir: RunDir, before: dict[str, Any] | None, now: dict[str, Any], fewest_steps: int | None) -> None:
    """Checks that the run on storage and the requested run have the same result.

    Args:
        before: of `read_metadata`.
        now: of `run_metadata`.
        fewest_steps: the number of steps may change to this number or more; None: it may not change, because a
            learning rate schedule depends on it.

    Raises:
        ResumeError: something that changes the result differs.
    """
    if before is not None and (found := list_differences(before, now, fewest_steps)):
        raise ResumeError(
            f"run {run_dir.path}",
            "\n         ".join(found),
            "a run is resumed with the settings and data that its result depends on",
            "restore them, or choose another run.name",
        )


def list_differences(before: dict[str, Any], now: dict[str, Any], fewest_steps: int | None) -> list[str]:
    """Differences that change the result, as "name: before -> now"; `fewest_steps` as in `check_resumable`."""
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


def step_to_resume(run_dir: RunDir) -> int:
    """Finished steps of the checkpoint from which the run goes on; 0 if it begins.

    Raises:
        ResumeError: checkpoints were saved, and none is left that is whole.
    """
    checkpoint, _ = CheckpointStore(run_dir).to_resume()
    if checkpoint is not None:
        return checkpoint.step
    if saved := [event.checkpoint for event in read(run_dir) if isinstance(event, CheckpointSaved)]:
        raise ResumeError(
            run_dir.child(CHECKPOINTS),
            f"no checkpoint, although {saved[-1]} was saved",
            "a run does not begin anew after it has saved",
            "restore a checkpoint, or begin anew with run.resume new and another run.name",
        )
    return 0


def newest_step(run_dir: RunDir) -> int:
    """Finished steps of the newest verified checkpoint; 0 if there is none."""
    checkpoint = CheckpointStore(run_dir).newest_verified()
    return checkpoint.step if checkpoint else 0
