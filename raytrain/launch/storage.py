"""Can the run's storage be used, from here and from every node? Found out before any worker trains."""

from __future__ import annotations

import uuid
from pathlib import Path

import ray
from pyarrow import fs
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain.errors import StorageError
from raytrain.rundir import RunDir

SEEN_TIMEOUT_S = 20.0


def absolute(storage: str) -> str:
    """A path made absolute against the directory of the driver; a URI as it is."""
    return storage if "://" in storage else str(Path(storage).expanduser().absolute())


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
            f"all nodes share it, so that any of them can save and resume; not seen by {', '.join(blind)}",
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
