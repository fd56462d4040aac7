"""Scripts that play on a machine of their own: Linux namespaces stand in for one, or for several hosts.

They see no Ray but their own, so they run beside the other tests, one after the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OWN = ["unshare", "--kill-child", "--pid", "--fork", "--mount", "--mount-proc"]
PREPARE = "mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && exec"
PATH = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {
    "PATH": PATH,
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_AUTH_MODE": "disabled",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}
SCRIPTS = {"autoscaled": (), "broken": ("--net",)}
"""Modules of `tests.support`, with the namespaces that they need besides."""


@cache
def can_be_made() -> bool:
    try:
        done = subprocess.run([*OWN, "--net", "sh", "-c", PREPARE + " ip link"], check=False, capture_output=True)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def start_all(directory: Path) -> dict[str, Future[dict[str, Any]]]:
    """Starts to play the scripts; what each prints comes later."""
    pool, played = ThreadPoolExecutor(1), {}
    for module, own in SCRIPTS.items():
        (directory / module).mkdir()
        variables = ENVIRONMENT | {"HOME": str(directory / module)}
        played[module] = pool.submit(play, f"tests.support.{module}", directory / module, own, variables)
    pool.shutdown(wait=False)
    return played


def play(
    module: str, directory: Path, own: tuple[str, ...], environment: dict[str, str], limit_s: float = 200.0
) -> dict[str, Any]:
    """Runs a script with the argument `directory`; when it ends, or is killed, all processes in its namespaces end.

    Args:
        own: flags of `unshare`, for namespaces besides those of processes and mounts.
        environment: all of its variables.
    """
    command = [*OWN, *own, "sh", "-c", f'{PREPARE} "$@"', "sh", sys.executable, "-m", module, str(directory)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=limit_s)
    if done.returncode:
        raise AssertionError(done.stdout[-3000:] + done.stderr[-6000:])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
