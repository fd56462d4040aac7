"""Which shell commands make a bare machine a node: what installs, what starts Ray, and which flags do they have?

Ray needs the same version of Ray and of Python on all nodes, so the setup does not rely on what an image contains.
Variables that are set before `ray start` reach Ray's own processes and all workers of that node. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from raytrain.cluster.file.document import Document, KeyPath, folded
from raytrain.cluster.file.spec import ClusterSpec

RAY, TORCH = "2.60.0", "2.13.0"
"""Versions that the nodes get; a test compares them with pyproject.toml and with the installed ones."""

PYTHONS, TORCHES = ">=3.10,<3.14", ">=2.8,<2.14"
"""Versions that raytrain works with; a test compares them with pyproject.toml."""

SOURCES = ("raytrain", "pyproject.toml", "README.md", "LICENSE")
"""What an installation from the sources needs. Not the whole directory: `ray up` reads and hashes all that it copies."""

TOKEN_FILE = "~/.ray/auth_token"
"""Where Ray looks for the token, on each node and on the machine that submits jobs."""

REMOTE, VENV = "~/raytrain-src", "~/venv"
UV = "~/.local/bin/uv"
"""Installs Python itself as well, so that it is the same on each image."""

PORT = 6379
START = {"head": "head_start_ray_commands", "worker": "worker_start_ray_commands"}
SETUP = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")

COMMON = {"RAY_AUTH_MODE": "token", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Each message carries the token; a process without GPUs sees those of its machine, as on a laptop."""

HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""Ray notices a dead node within 1.6 s, and one that is cut off within 4.2 s (by default 13 s and 63 s; measured)."""

RECONNECT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "10"}
"""Seconds after which a worker node that has lost the head ends itself (by default 60)."""

V1 = {"RAY_enable_autoscaler_v2": "0", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "10"}
"""Autoscaler v1, which starts all machines of the provider `local`, and those that come back."""

PRELOAD = {"RAY_preload_python_modules": "torch"}
"""Worker processes import it before they are needed."""


def mounts(spec: ClusterSpec) -> dict[str, str]:
    """file_mounts of the sources: path on the node -> path here."""
    here = "" if spec.project == "." else spec.project.rstrip("/") + "/"
    return {f"{REMOTE}/{name}": here + name for name in SOURCES} if spec.setup == "venv" else {}


def install(spec: ClusterSpec) -> list[str]:
    """Shell commands that install all in one virtual environment, and put it on the PATH of each shell."""
    if spec.setup == "none":
        return []
    return [
        f"test -x {UV} || curl -LsSf https://astral.sh/uv/0.8.0/install.sh | sh",
        f"test -d {VENV} || {UV} venv --seed --python {spec.python} {VENV}",
        f"{UV} pip install --python {VENV} 'ray[default,data,train,tune]=={RAY}' torch=={TORCH} -e {REMOTE}",
        "grep -qs venv/bin ~/.bashrc || echo 'export PATH=$HOME/venv/bin:$PATH' >> ~/.bashrc",
    ]


def start_head(spec: ClusterSpec, environment: Mapping[str, str] = {}, flags: tuple[str, ...] = ()) -> list[str]:
    """The commands that start Ray on the head."""
    words = (
        *("--head", f"--port={PORT}", *flags, "--dashboard-host=127.0.0.1", f"--num-cpus={spec.head_cpus}", "--num-gpus=0"),
        *_given({"--object-store-memory": spec.object_store_memory}),
        "--autoscaling-config=~/ray_bootstrap_config.yaml",
    )
    return _start(spec, {**COMMON, **HEALTH, **environment}, words)


def start_worker(spec: ClusterSpec, environment: Mapping[str, str] = {}) -> list[str]:
    """The commands that start Ray on a worker."""
    has = {"--num-cpus": spec.worker_cpus, "--num-gpus": spec.worker_gpus, "--object-store-memory": spec.object_store_memory}
    return _start(spec, {**COMMON, **RECONNECT, **environment}, (f"--address=$RAY_HEAD_IP:{PORT}", *_given(has)))


def _start(spec: ClusterSpec, environment: Mapping[str, str], words: tuple[str, ...]) -> list[str]:
    first = f"{spec.activate}; " if spec.activate else ""
    *variables, last = (f"{name}={value}" for name, value in environment.items())
    return [f"{first}ray stop", folded([f"{first}export", *variables, f"{last};", "ulimit -n 65536;", "ray start", *words])]


def _given(flags: Mapping[str, int | None]) -> Iterator[str]:
    return (f"{flag}={number}" for flag, number in flags.items() if number is not None)


def start_commands(document: Document, kind: str) -> tuple[str, KeyPath]:
    """All commands that start Ray on a head or a worker, joined, and the path of the one with `ray start`.

    Where the file has none, these are the ones that Ray runs by default.
    """
    key = START[kind]
    given = document.get(key)
    commands = document.items(key) if given is not None else document.provider_defaults.get(key, [])
    index = next((i for i, command in enumerate(commands) if "ray start" in str(command)), None)
    return "; ".join(map(str, commands)), (key,) if index is None or given is None else (key, index)


def setup_commands(document: Document) -> Iterator[tuple[KeyPath, str]]:
    """All commands of the file that install something, with their paths."""
    types = [("available_node_types", name) for name in document.mapping("available_node_types")]
    for key in SETUP:
        for parent in [(), *types]:
            for index, command in enumerate(document.items(*parent, key)):
                yield (*parent, key, index), str(command)


def flag_of(command: str, flag: str) -> str | None:
    """The value of a flag: '8' in both '--num-cpus=8' and '--num-cpus 8'; None without the flag."""
    found = re.search(rf"(?<!\S){re.escape(flag)}(?:=|\s+)(\S+)", command)
    return found[1].rstrip(";").strip("'\"") if found else None


def variable_of(command: str, name: str) -> str | None:
    """The last value of an environment variable: 'token' in 'export RAY_AUTH_MODE=token;'."""
    found = re.findall(rf"(?<![\w-]){re.escape(name)}=([^\s;&]*)", command)
    return found[-1].strip("'\"") if found else None
