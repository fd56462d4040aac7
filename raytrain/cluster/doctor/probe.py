"""Examines the node it runs on: versions, limits, disks, the storage, torch, an all-reduce with the other nodes.

One `Probe` actor without CPUs runs on each node and answers with plain values; `verdicts` judges them. cloudpickle sends
this module by value, since raytrain may be missing on a node: at the top it imports only Python, what Ray brings, and
`worker.network`, which is sent along.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from raytrain.worker.network import join_store, network_variables, serve_store

PACKAGES = (
    *("ray", "torch", "numpy", "pyarrow", "pydantic"),
    *("aiohttp", "click", "jsonschema", "packaging", "psutil", "requests", "rich", "ruamel.yaml"),
    *("safetensors", "tenacity"),
)
"""The dependencies in raytrain's pyproject.toml."""
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
NVIDIA_SMI_TIMEOUT_S = 10.0
GLOO = "GLOO_SOCKET_IFNAME"
GPUS = "CUDA_VISIBLE_DEVICES"
SMALL, LARGE = 1, 2**21
"""Elements of the two float32 tensors of the all-reduce."""
SMALL_REPEATS, LARGE_REPEATS = 20, 3


class Probe:
    """Each call that may hang has its own timeout, so that the answer says how far it got.

    Args:
        variables: environment variables that a run's workers take over from the driver, unless they have their own.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        import ray

        self._address = ray.util.get_node_ip_address()
        self._session_dir = ray._private.worker._global_node.get_session_dir_path()
        self._store: Any = None
        show_all_gpus(os.environ, os.getppid())
        for name, value in {**network_variables(self._address), **variables}.items():
            os.environ.setdefault(name, value)

    def facts(self) -> dict[str, Any]:
        """The fields of `verdicts.Facts`."""
        return host_facts(self._session_dir, os.getppid())

    def now(self) -> float:
        """Unix seconds."""
        return time.time()

    def storage(self, directory: str, theirs: str, mine: str, timeout_s: float) -> str:
        """Reads the driver's file and writes one of its own; returns what failed, or ""."""
        error = with_timeout(timeout_s, read_file, directory, theirs)[1]
        if error:
            return f"cannot read what the driver wrote ({error})"
        error = with_timeout(timeout_s, write_file, directory, mine)[1]
        return f"cannot write ({error})" if error else ""

    def torch(self) -> dict[str, Any]:
        """The fields of `verdicts.Torch`."""
        try:
            import torch
            import torch.distributed
        except (ImportError, OSError) as error:  # OSError: a shared library is missing
            return {"gpus": 0, "nccl": "", "error": str(error)}
        version: Any = torch.cuda.nccl.version  # it has no types
        has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
        nccl = ".".join(map(str, version())) if has_nccl else ""
        return {"gpus": torch.cuda.device_count(), "nccl": nccl, "error": ""}

    def serve_store(self, timeout_s: float) -> tuple[str, int, str]:
        """Host and port of the store that this process serves as rank 0; and why it does not, or ""."""
        self._store, error = with_timeout(timeout_s, serve_store, self._address, timeout_s)
        return self._address, self._store.port if self._store else 0, error

    def all_reduce(
        self, backend: str, rank: int, num_ranks: int, store: tuple[str, int], timeout_s: float
    ) -> dict[str, Any]:
        """The fields of `verdicts.AllReduce`."""
        progress: dict[str, Any] = {"phase": "finding the first node"}
        inner_timeout_s = 0.8 * timeout_s  # torch's error says more than ours

        def run() -> tuple[float, float]:
            client = self._store if rank == 0 else join_store(*store, inner_timeout_s)
            return measure_all_reduce(progress, backend, rank, num_ranks, client, inner_timeout_s)

        measured, error = with_timeout(timeout_s, run)
        if measured is None:
            return {**progress, "error": error}
        return {"phase": "done", "done": True, "latency_s": measured[0], "bytes_per_s": measured[1]}


def with_timeout(timeout_s: float, function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """What a function returns, or None and its error; after the timeout it goes on in its own thread."""
    outcome: list[tuple[Any, str]] = []

    def call() -> None:
        try:
            outcome.append((function(*args), ""))
        except (OSError, RuntimeError, ValueError, ImportError) as error:
            outcome.append((None, f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if outcome:
        return outcome[0]
    return None, f"timed out after {timeout_s:g} s" if thread.is_alive() else "ended without an answer"


def host_facts(session_dir: str, raylet_pid: int) -> dict[str, Any]:
    """The fields of `verdicts.Facts`.

    Args:
        session_dir: of Ray on this node.
        raylet_pid: the process that started this one.
    """
    interface, address = gloo_address(os.environ)
    return {
        "hostname": socket.gethostname(),
        "versions": versions(),
        "raytrain_digest": raytrain_digest(),
        "gpu_drivers": gpu_drivers(),
        "interface": interface,
        "interface_address": address,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "session_disk": disk_usage(session_dir),
        "object_store": object_store_dir(raylet_pid),
        "shm_bytes": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
    }


def versions() -> dict[str, str]:
    """Versions of Python, raytrain and its dependencies; "" for a missing package."""
    found = {"python": platform.python_version(), "raytrain": ""}
    with contextlib.suppress(ImportError):
        from raytrain.version import VERSION

        found["raytrain"] = VERSION
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def raytrain_digest() -> str:
    """SHA-256 of raytrain's source files, since two copies of one version may differ; "" if it cannot be imported."""
    try:
        from raytrain import version
    except ImportError:
        return ""
    root, digest = Path(version.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def gpu_drivers() -> tuple[str, ...]:
    """The driver version of each NVIDIA GPU; empty where nvidia-smi is missing, fails or hangs."""
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())


def gloo_address(environment: Mapping[str, str]) -> tuple[str, str]:
    """The interface that gloo is told to use and its address, or "" and the address of the hostname.

    Gloo uses the loopback interface if the hostname does not resolve; ProcessGroupGloo.cpp of PyTorch.
    """
    interface = environment.get(GLOO, "").split(",")[0]
    if interface:
        found = [a.address for a in psutil.net_if_addrs().get(interface, []) if a.family == socket.AF_INET]
        return interface, found[0] if found else ""
    try:
        return "", socket.gethostbyname(socket.gethostname())
    except OSError:
        return "", "127.0.0.1"


def disk_usage(path: str) -> tuple[str, int, int]:
    """The fields of `verdicts.Disk`, for the nearest directory that exists."""
    nearest = next(parent for parent in (Path(path), *Path(path).parents) if parent.exists())
    usage = shutil.disk_usage(nearest)
    return path, usage.free, usage.total


def object_store_dir(raylet_pid: int) -> str:
    """The directory of a node's object store: Ray falls back to the disk where /dev/shm is too small. "" if not known."""
    try:
        words = psutil.Process(raylet_pid).cmdline()
    except psutil.Error:
        return ""
    flag = "--plasma_directory="
    return next((word.removeprefix(flag) for word in words if word.startswith(flag)), "")


def show_all_gpus(environment: MutableMapping[str, str], raylet_pid: int) -> None:
    """Undoes what Ray hides from a process that reserves no GPU (RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO)."""
    try:
        original = psutil.Process(raylet_pid).environ().get(GPUS)
    except psutil.Error:
        return
    environment.pop(GPUS, None)
    environment.update({} if original is None else {GPUS: original})


def make_directory(directory: str) -> bool:
    """Creates a directory with its parents, on any filesystem of pyarrow; returns whether its parent is new.

    Raises:
        OSError, ValueError: it cannot be created.
    """
    from pyarrow import fs

    filesystem, path = _filesystem(directory)
    parent = path.rpartition("/")[0]
    is_new = bool(filesystem.get_file_info(parent).type == fs.FileType.NotFound)
    filesystem.create_dir(path, recursive=True)
    return is_new


def remove_directory(directory: str, with_parent: bool) -> None:
    """Removes a directory with its contents, and its parent if that is empty afterwards.

    Raises:
        OSError: it cannot be removed.
    """
    from pyarrow import fs

    filesystem, path = _filesystem(directory)
    filesystem.delete_dir(path)
    parent = path.rpartition("/")[0]
    if with_parent and not filesystem.get_file_info(fs.FileSelector(parent, allow_not_found=True)):
        filesystem.delete_dir(parent)


def read_file(directory: str, name: str) -> None:
    """Reads a file that contains its own name.

    Raises:
        OSError, ValueError: it is missing, or contains something else.
    """
    filesystem, path = _filesystem(directory)
    with filesystem.open_input_stream(f"{path}/{name}") as stream:
        if stream.read() != name.encode():
            raise OSError(f"{name} does not contain what was written")


def write_file(directory: str, name: str) -> None:
    """Writes a file that contains its own name. Raises as `read_file` does."""
    filesystem, path = _filesystem(directory)
    with filesystem.open_output_stream(f"{path}/{name}") as stream:
        stream.write(name.encode())


def _filesystem(directory: str) -> tuple[Any, str]:
    from pyarrow import fs

    return fs.FileSystem.from_uri(directory) if "://" in directory else (fs.LocalFileSystem(), directory)


def measure_all_reduce(
    progress: MutableMapping[str, Any], backend: str, rank: int, num_ranks: int, store: Any, timeout_s: float
) -> tuple[float, float]:
    """Latency in seconds of a small tensor, and bus bandwidth in bytes per second with one of 8 MiB.

    Args:
        progress: its "phase" says how far it got, also while it waits.
        backend: gloo or nccl.
        timeout_s: of forming the group, and of each all-reduce.

    Raises:
        RuntimeError: no connection, or a wrong sum.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    progress["phase"] = "connecting"
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=PrefixStore(backend, store), rank=rank, world_size=num_ranks, timeout=timeout)
    progress["phase"] = "summing"
    try:
        vector = torch.full((LARGE,), rank + 1.0, device=device)
        dist.all_reduce(vector)
        check_sum(vector, num_ranks)
        latency_s = _mean_seconds(torch.zeros(SMALL, device=device), SMALL_REPEATS)
        seconds = _mean_seconds(torch.zeros(LARGE, device=device), LARGE_REPEATS)
        _wait_for_all(PrefixStore(f"{backend}-end", store), rank, num_ranks)
    finally:
        dist.destroy_process_group()
    return latency_s, bus_bandwidth(4 * LARGE, seconds, num_ranks)


def bus_bandwidth(size_bytes: int, seconds: float, num_ranks: int) -> float:
    """Bytes per second that each link carries in an all-reduce: S/t * 2(n-1)/n; doc/PERFORMANCE.md of nccl-tests."""
    return size_bytes / seconds * 2 * (num_ranks - 1) / num_ranks


def check_sum(vector: Any, num_ranks: int) -> None:
    """Rank r contributes r + 1, so the sum is n(n + 1)/2, exact in float32 up to 5000 ranks.

    Raises:
        RuntimeError: the sum is wrong.
    """
    expected = num_ranks * (num_ranks + 1) / 2
    if not bool((vector == expected).all()):
        raise RuntimeError(f"wrong sum: {vector.min().item():g} to {vector.max().item():g} instead of {expected:g}")


def _wait_for_all(store: Any, rank: int, num_ranks: int) -> None:
    """A process that exits closes its connections while the last all-reduce of others may still be in flight."""
    store.set(str(rank), "done")
    store.wait([str(other) for other in range(num_ranks)])


def _mean_seconds(vector: Any, repeats: int) -> float:
    """Of one all-reduce; zeros stay zeros."""
    import torch
    import torch.distributed as dist

    began = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(vector)
    if vector.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats
