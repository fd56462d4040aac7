"""What does this machine say of itself, as a value? Runs on the nodes, and in the driver, which compares.

Sent to the nodes by value, since raytrain may be missing there: only Python and what Ray brings is imported at the top.
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
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    *("ray", "torch", "numpy", "pyarrow", "pydantic", "pydantic-settings"),
    *("aiohttp", "click", "jsonschema", "packaging", "psutil", "pyyaml", "requests", "rich", "safetensors"),
)
"""What raytrain depends on, as its pyproject.toml says."""

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
NVIDIA_SMI_LIMIT_S = 10.0
GLOO = "GLOO_SOCKET_IFNAME"
GPUS = "CUDA_VISIBLE_DEVICES"


def gather(temp: str, raylet: int) -> dict[str, Any]:
    """The arguments of `facts.Facts`; also for the driver, which compares.

    Args:
        temp: the directory of Ray's session.
        raylet: number of the process that started this one.
    """
    interface, address = gloo_address(os.environ)
    return {
        "hostname": socket.gethostname(),
        "versions": versions(),
        "raytrain_files": raytrain_files(),
        "gpu_drivers": gpu_drivers(),
        "interface": interface,
        "interface_address": address,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "temp": disk(temp),
        "object_store": object_store(raylet),
        "shm_bytes": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
    }


def versions() -> dict[str, str]:
    """Of python, raytrain and its dependencies; "" for what is missing."""
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


def raytrain_files() -> str:
    """A digest of raytrain's source files, since two of one version may differ; "" if it cannot be imported."""
    try:
        from raytrain import version
    except ImportError:
        return ""
    root, digest = Path(version.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def gpu_drivers() -> tuple[str, ...]:
    """The version of the driver for each NVIDIA GPU; none where nvidia-smi says nothing."""
    try:
        said = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_LIMIT_S)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in said.stdout.splitlines() if line.strip())


def gloo_address(environment: Mapping[str, str]) -> tuple[str, str]:
    """The interface that gloo is told to use and its address, or "" and the address of the hostname.

    A hostname that stands for nothing makes gloo use the loopback interface; ProcessGroupGloo.cpp of PyTorch.
    """
    interface = environment.get(GLOO, "").split(",")[0]
    if interface:
        found = [a.address for a in psutil.net_if_addrs().get(interface, []) if a.family == socket.AF_INET]
        return interface, found[0] if found else ""
    try:
        return "", socket.gethostbyname(socket.gethostname())
    except OSError:
        return "", "127.0.0.1"


def disk(path: str) -> tuple[str, int, int]:
    """The arguments of `facts.Disk`, for the nearest directory that exists."""
    there = next(parent for parent in (Path(path), *Path(path).parents) if parent.exists())
    usage = shutil.disk_usage(there)
    return path, usage.free, usage.total


def object_store(raylet: int) -> str:
    """The directory that a node was given for its objects: Ray falls back to the disk where /dev/shm is too small."""
    try:
        words = Path(f"/proc/{raylet}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    flag = "--plasma_directory="
    return next((word.removeprefix(flag) for word in words if word.startswith(flag)), "")


def show_all_gpus(environment: MutableMapping[str, str], raylet: int) -> None:
    """Takes back what Ray hides from a process that reserves no GPU (RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO)."""
    try:
        words = Path(f"/proc/{raylet}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return
    original = [word.partition("=")[2] for word in words if word.startswith(f"{GPUS}=")]
    environment.pop(GPUS, None)
    environment.update({GPUS: original[0]} if original else {})
