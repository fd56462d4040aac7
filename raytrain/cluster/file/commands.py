"""Which shell commands make a bare machine a node: what installs, and what starts Ray. Pure; the same for all providers.

Variables that are set before `ray start` reach Ray's own processes and all workers of that node.
"""

from __future__ import annotations

from collections.abc import Mapping

from raytrain.cluster.file.emitter import Folded
from raytrain.cluster.file.spec import ClusterSpec

TOKEN_FILE = "~/.ray/auth_token"
"""Where Ray looks for the token, on each node and on the machine of whoever submits jobs."""

PORT = 6379

COMMON = {"RAY_AUTH_MODE": "token", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Each message carries the token; a process without GPUs sees those of its machine, as on a laptop."""

HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""A dead node is noticed within 1.6 s, one that is cut off within 4.2 s (by default 13 s and 63 s; measured)."""

RECONNECT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "10"}
"""Seconds after which a worker node that has lost the head ends itself (by default 60)."""

V1 = {
    "RAY_enable_autoscaler_v2": "0",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "10",
}
"""Ray's older autoscaler, which starts all machines of the provider `local`, and those that come back."""

PRELOAD = {"RAY_preload_python_modules": "torch"}
"""Worker processes import it before they are asked for."""


def start_head(spec: ClusterSpec, environment: Mapping[str, str] = {}, extra: tuple[str, ...] = ()) -> list[str]:
    """The commands that start Ray on the head."""
    words = (
        *("--head", f"--port={PORT}", *extra, "--dashboard-host=127.0.0.1", f"--num-cpus={spec.head_cpus}", "--num-gpus=0"),
        *_store(spec),
        "--autoscaling-config=~/ray_bootstrap_config.yaml",
    )
    return _start(spec, {**COMMON, **HEALTH, **environment}, words)


def start_worker(spec: ClusterSpec, environment: Mapping[str, str] = {}) -> list[str]:
    """The commands that start Ray on a worker."""
    words = (f"--address=$RAY_HEAD_IP:{PORT}", *_own(spec), *_store(spec))
    return _start(spec, {**COMMON, **RECONNECT, **environment}, words)


def _start(spec: ClusterSpec, environment: Mapping[str, str], words: tuple[str, ...]) -> list[str]:
    first = f"{spec.activate}; " if spec.activate else ""
    variables = [f"{name}={value}" for name, value in environment.items()]
    lines = [f"{first}export", *variables[:-1], f"{variables[-1]};", "ulimit -n 65536;", "ray start", *words]
    return [f"{first}ray stop", Folded("\n".join(lines))]


def _own(spec: ClusterSpec) -> tuple[str, ...]:
    given = {"--num-cpus": spec.worker_cpus, "--num-gpus": spec.worker_gpus}
    return tuple(f"{flag}={number}" for flag, number in given.items() if number is not None)


def _store(spec: ClusterSpec) -> tuple[str, ...]:
    return () if spec.object_store_memory is None else (f"--object-store-memory={spec.object_store_memory}",)
