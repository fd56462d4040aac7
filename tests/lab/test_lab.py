"""A cluster of several hosts, from `ray up` to `ray down`: the run on it is the one of a single host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.namespaces import PATH, can_be_made, play
from tests.lab import tools
from tests.lab.hosts import first_processes

LIMIT_S = 500.0
pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(not can_be_made(), reason="namespaces need Linux, root, and iproute2"),
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    lab = tmp_path_factory.mktemp("lab")
    if lacking := tools.unpack(lab / "over"):
        pytest.skip(lacking)
    (lab / "home").mkdir()
    environment = {
        "PATH": PATH,
        "HOME": str(lab / "home"),
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return play("tests.lab.story", lab, ("--net",), environment, LIMIT_S)


def test_three_hosts_that_come_and_go_end_with_the_curve_of_one(played: dict[str, Any]) -> None:
    assert played["nodes"] == ["10.77.0.2", "10.77.0.3", "10.77.0.4"], "the head never trains"
    assert played["outcomes"] == ["stopped", "completed"]
    assert len(played["losses"]) == played["stopped"] + 500
    assert played["losses"] == played["alone"], "to the last bit, as asked for: this job lets a rounding grow"


def test_no_host_that_goes_costs_a_step(played: dict[str, Any]) -> None:
    assert played["restored"] == [0, played["stopped"]], "a checkpoint is read only where all workers are new"


def test_r11_a_storage_that_the_hosts_do_not_share_is_refused_and_they_are_named(played: dict[str, Any]) -> None:
    code, log = played["refused"]
    assert (code, "Traceback" in log) == (1, False)
    assert "run.storage\n  value: /root/runs\n" in log
    assert "not seen by 10.77.0.2, 10.77.0.3, 10.77.0.4" in log


def test_r16_a_job_that_is_stopped_saves_within_the_time_that_ray_gives_it(played: dict[str, Any]) -> None:
    assert played["stopped"] > 0
    assert "\r" not in played["log"]
    assert "stopped" in played["log"]


def test_nothing_is_left_of_the_hosts(played: dict[str, Any]) -> None:
    """A namespace is there as long as one of its processes is, or a mount of it."""
    assert played["boots"] == 4, "their first processes were there"
    assert first_processes() == []
    assert "/mnt" not in [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
