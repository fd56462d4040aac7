"""Can the run's storage be used, from here and from every node? Found out before any worker trains."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import ray
from pyarrow import fs
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain.elastic.variables import SUBMIT_DIRECTORY
from raytrain.errors import StorageError
from raytrain.rundir import RunDir

SEEN_TIMEOUT_S = 20.0


UNPACKED = "working_dir_files"
"""Name of Ray's folder into which it unpacks the working directories of jobs; it goes away with the cluster."""


def absolute(storage: str) -> str:
    """A path made absolute against the directory of the driver; a URI as it is.

    A job's driver is in Ray's copy of a directory, so there it is the directory in which `raytrain submit` was called, if
    there is such a one on the driver's node, and the home directory otherwise.
    """
    if "://" in storage:
        return storage
    if not is_moved(storage):
        return str(Path(storage).expanduser().absolute())
    called_in = os.environ.get(SUBMIT_DIRECTORY, "")
    return str(Path(called_in if Path(called_in).is_absolute() and Path(called_in).is_dir() else Path.home()) / storage)


def is_moved(storage: str) -> bool:
    """Whether a relative path cannot mean the directory of the driver, since that goes away with the cluster."""
    is_relative = "://" not in storage and not Path(storage).expanduser().is_absolute()
    return is_relative and UNPACKED in Path.cwd().parts


def moved_to(run_dir: RunDir) -> str:
    """What is said of such a path."""
    return (
        f"the run is kept in {run_dir.path}, since the directory of a job goes away with its cluster; "
        "for several nodes, set run.storage to a place that all of them reach"
    )


def locate(storage: str, name: str) -> RunDir:
    """The run's directory.

    Raises:
        StorageError: the storage is not understood.
    """
    try:
        return RunDir.at(storage, name)
    except (OSError, ValueError) as error:
        raise _unusable(storage, error) from error


def check_writable(storage: str, name: str) -> RunDir:
    """The run's directory, made and written to.

    Raises:
        StorageError: it cannot be.
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
    """Every living node sees the run's directory.

    Raises:
        StorageError: some do not; they are named.
    """
    if not run_dir.is_local:
        return
    mark = run_dir.child(f".seen-{uuid.uuid4().hex}")
    Path(mark).write_text("raytrain")
    try:
        blind = _nodes_that_do_not_see(mark)
    finally:
        Path(mark).unlink()
    if blind:
        raise StorageError(
            "run.storage",
            storage,
            f"all nodes share it, so that any of them can save and resume; not seen by {', '.join(sorted(blind))}",
            "set run.storage to a path that they share or to a URI, for example s3://bucket/runs",
        )


def _unusable(storage: str, error: Exception) -> StorageError:
    return StorageError("run.storage", f"{storage}: {error}", "is a place that can be written", "choose another place")


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
    return [node["NodeManagerAddress"] for answer, node in asked.items() if answer not in done or not ray.get(answer)]


def _sees(path: str) -> bool:
    return bool(fs.LocalFileSystem().get_file_info(path).type == fs.FileType.File)
