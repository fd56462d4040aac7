"""Can the driver and every node use the run's storage? Checked before any worker starts.

Also resolves relative paths, which mean the submit directory in a job. Writes no file that stays. Runs in the driver.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

import ray
from pyarrow import fs
from ray.exceptions import NodeDiedError, TaskUnschedulableError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain.elastic.environment import SUBMIT_DIRECTORY
from raytrain.errors import StorageError
from raytrain.rundir import RunDir, is_uri, local_path

SEEN_TIMEOUT_S = 20.0
UNPACKED = "working_dir_files"
"""Directory into which Ray unpacks the working directories of jobs; deleted with the cluster."""


def absolute(storage: str) -> str:
    """Resolves a path, or that of a file URI, against the driver's working directory; another URI is returned as it is.

    The working directory of a job is a copy made by Ray. There, paths are resolved against the directory in which
    `raytrain submit` was called, if it exists on the driver's node, else against the home directory.

    Raises:
        StorageError: a file URI has no absolute path.
    """
    if is_uri(storage):
        return storage
    try:
        storage = local_path(storage)
    except ValueError as error:
        raise _unusable(storage, error) from None
    if not is_moved(storage):
        return str(Path(storage).expanduser().absolute())
    called_in = os.environ.get(SUBMIT_DIRECTORY, "")
    return str(Path(called_in if Path(called_in).is_absolute() and Path(called_in).is_dir() else Path.home()) / storage)


def is_moved(storage: str) -> bool:
    """Whether a path is relative to the working directory of a job, which is deleted with the cluster."""
    is_relative = "://" not in storage and not Path(storage).expanduser().is_absolute()
    return is_relative and UNPACKED in Path.cwd().parts


def moved_to(run_dir: RunDir) -> str:
    """The message for such a path."""
    return (
        f"the run is stored in {run_dir.path}, because the working directory of a job is deleted with its cluster; "
        "with several nodes, set run.storage to a path that all of them share"
    )


def locate(storage: str, name: str) -> RunDir:
    """The run's directory.

    Raises:
        StorageError: the path or URI is invalid.
    """
    try:
        return RunDir.at(storage, name)
    except (OSError, ValueError) as error:
        raise _unusable(storage, error) from error


def check_writable(storage: str, name: str) -> RunDir:
    """Creates the run's directory and checks that it is writable.

    Raises:
        StorageError: it is not.
    """
    run_dir = locate(storage, name)
    try:
        run_dir.filesystem.create_dir(run_dir.path, recursive=True)
        probe = run_dir.child(f".probe-{uuid.uuid4().hex}")
        with run_dir.filesystem.open_output_stream(probe) as stream:
            stream.write(b"raytrain")
        run_dir.filesystem.delete_file(probe)
    except (OSError, ValueError) as error:
        raise _unusable(storage, error) from error
    return run_dir


def check_shared(run_dir: RunDir, storage: str) -> None:
    """Checks that every alive node sees the run's directory.

    Raises:
        StorageError: some do not; the message names them.
    """
    if not run_dir.is_local:
        return
    mark = run_dir.child(f".seen-{uuid.uuid4().hex}")
    try:
        with run_dir.filesystem.open_output_stream(mark) as stream:
            stream.write(b"raytrain")
        try:
            blind = _nodes_that_do_not_see(mark)
        finally:
            run_dir.filesystem.delete_file(mark)
    except OSError as error:
        raise _unusable(storage, error) from error
    if blind:
        raise StorageError(
            "run.storage",
            storage,
            f"all nodes share it, so that each of them can save and resume; not seen by {', '.join(sorted(blind))}",
            "set run.storage to a path that all nodes share, or to a URI, for example s3://bucket/runs",
        )


def _unusable(storage: str, error: Exception) -> StorageError:
    return StorageError("run.storage", f"{storage}: {error}", "is writable", "set run.storage to a writable path or URI")


def _nodes_that_do_not_see(mark: str) -> list[str]:
    mine = ray.get_runtime_context().get_node_id()
    look = ray.remote(num_cpus=0)(_sees)
    asked = {
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(mark): node
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] != mine
    }
    if not asked:
        return []
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=SEEN_TIMEOUT_S)
    blind = []
    for answer, node in asked.items():
        with contextlib.suppress(TaskUnschedulableError, WorkerCrashedError, NodeDiedError):  # it is no node any more
            if answer not in done or not ray.get(answer):
                blind.append(node["NodeManagerAddress"])
    return blind


def _sees(path: str) -> bool:
    return bool(fs.LocalFileSystem().get_file_info(path).type == fs.FileType.File)
