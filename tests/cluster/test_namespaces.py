"""What needs a machine of one's own: namespaces stand in for several hosts. Each test is a script that runs in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

ROOT = Path(__file__).parents[2]
OWN = ["unshare", "--pid", "--fork", "--mount", "--mount-proc"]
PREPARE = "mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && exec"
QUICK_HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_AUTH_MODE": "disabled",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}


def can_make_namespaces() -> bool:
    try:
        return (
            subprocess.run([*OWN, "--net", "sh", "-c", PREPARE + " ip link"], check=False, capture_output=True).returncode
            == 0
        )
    except FileNotFoundError:
        return False


pytestmark = [
    pytest.mark.timeout(170),
    pytest.mark.skipif(not can_make_namespaces(), reason="namespaces need Linux, root, and iproute2"),
]


def play(module: str, tmp_path: Path, *own: str) -> dict[str, Any]:
    """Runs a script of `tests.support` in namespaces of its own; when it ends, all processes in them end."""
    ray.shutdown()
    command = [
        *OWN,
        *own,
        "sh",
        "-c",
        f'{PREPARE} "$@"',
        "sh",
        sys.executable,
        "-m",
        f"tests.support.{module}",
        str(tmp_path),
    ]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment | QUICK_HEALTH, capture_output=True, text=True, check=False, timeout=160
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_the_cluster_grows_for_a_run_and_shrinks_after_it(tmp_path: Path) -> None:
    answer = play("autoscaled", tmp_path)
    assert (answer["before"], answer["during"], answer["after"]) == (1, 4, 1)
    assert answer["generations"][-1] == 3


def test_r6_a_worker_whose_network_is_cut_is_left_behind_within_30_s_with_the_defaults(tmp_path: Path) -> None:
    answer = play("cut_off", tmp_path, "--net")
    assert answer["nodes"] == ["10.77.1.1", "10.77.1.2"]
    assert answer["seconds"] < 30
    assert answer["restored"] == [0], "nothing went back to a checkpoint"
