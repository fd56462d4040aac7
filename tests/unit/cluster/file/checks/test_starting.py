"""Start commands: nodes find each other, the head starts workers, and nobody else gets in."""

from __future__ import annotations

import pytest

from raytrain.cluster.file.checks.commands import flag_of, variable_of
from tests.unit.cluster.file.support import edited, found, rendered

AWS = rendered("aws")
LOCAL = rendered("local", setup="none")
HEAD, WORKER = "head_start_ray_commands[1]", "worker_start_ray_commands[1]"


def places(text: str) -> list[str]:
    return [each.where for each in found(text)]


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("    ray start\n    --head\n", "    ray start\n", HEAD),
        ("    --autoscaling-config=~/ray_bootstrap_config.yaml\n", "", HEAD),
        ("    --address=$RAY_HEAD_IP:6379\n", "", WORKER),
        ("--address=$RAY_HEAD_IP:6379", "--address=10.0.0.1:6379", WORKER),
        ("--address=$RAY_HEAD_IP:6379", "--address=$RAY_HEAD_IP", WORKER),
        ("    --port=6379\n", "    --port=6400\n", WORKER),
    ],
)
def test_nodes_that_would_not_find_each_other(old: str, new: str, where: str) -> None:
    assert places(edited(AWS, old, new)) == [where]


def test_other_ways_to_write_the_same_are_fine() -> None:
    same = edited(AWS, "--address=$RAY_HEAD_IP:6379", '--address "${RAY_HEAD_IP}:6400"')
    assert found(edited(same, "--port=6379", "--port 6400")) == []


def test_commands_without_ray_start() -> None:
    assert places(edited(AWS, "    ray start\n    --head\n", "    echo\n")) == [HEAD.replace("[1]", "")]
    assert places(edited(AWS, "    ray start\n    --address", "    echo\n    --address")) == [WORKER.replace("[1]", "")]


@pytest.mark.parametrize("kind", ["head", "worker"])
def test_ray_that_runs_is_stopped_first(kind: str) -> None:
    first = f"{kind}_start_ray_commands:\n"
    assert places(edited(AWS, first + "  - ray stop\n", first)) == [f"{kind}_start_ray_commands[0]"]


def test_a_token_is_needed_on_both_sides() -> None:
    assert places(edited(AWS, "    RAY_AUTH_MODE=token\n", "", count=2)) == [HEAD, WORKER]
    assert [
        each.value
        for each in found(edited(AWS, "RAY_AUTH_MODE=token\n    RAY_ACC", "RAY_AUTH_MODE=disabled\n    RAY_ACC", 2))
    ] == ["RAY_AUTH_MODE=disabled"] * 2


def test_the_token_has_to_get_to_the_nodes() -> None:
    gone = edited(AWS, "  ~/.ray/auth_token: ~/.ray/auth_token\n", "")
    assert places(gone) == ["file_mounts"]
    assert found(edited(AWS, "  ~/.ray/auth_token: ~/", "  /home/ubuntu/.ray/auth_token: ~/")) == []
    assert found(edited(gone, "    RAY_AUTH_MODE=token", "    RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/x", 2)) == []


def test_the_users_own_token_is_made_first() -> None:
    (mistake,) = found(AWS, exists=lambda path: path != "~/.ray/auth_token")
    assert (mistake.where, mistake.fix) == ("file_mounts.~/.ray/auth_token", "run: ray get-auth-token --generate")


def test_a_dashboard_for_everybody_needs_a_token() -> None:
    opened = edited(AWS, "--dashboard-host=127.0.0.1", "--dashboard-host=0.0.0.0")
    assert found(opened) == []
    head, worker = opened.split("worker_start_ray_commands")
    unsafe = edited(head, "    RAY_AUTH_MODE=token\n", "") + "worker_start_ray_commands" + worker
    assert [each.value for each in found(unsafe)] == ["--dashboard-host=0.0.0.0", "no RAY_AUTH_MODE"]


@pytest.mark.parametrize(
    ("rule", "is_open"),
    [
        ("{FromPort: 22, ToPort: 22, IpProtocol: tcp, IpRanges: [{CidrIp: 0.0.0.0/0}]}", False),
        ("{FromPort: 22, ToPort: 65535, IpProtocol: tcp, IpRanges: [{CidrIp: 0.0.0.0/0}]}", True),
        ("{FromPort: 8265, ToPort: 8265, IpProtocol: tcp, Ipv6Ranges: [{CidrIpv6: '::/0'}]}", True),
        ("{IpProtocol: '-1', IpRanges: [{CidrIp: 10.0.0.0/8}, {CidrIp: 0.0.0.0/0}]}", True),
        ("{FromPort: 8265, ToPort: 8265, IpProtocol: tcp, IpRanges: [{CidrIp: 10.0.0.0/8}]}", False),
    ],
)
def test_ports_that_are_open_to_the_world(rule: str, is_open: bool) -> None:
    group = f"  region: us-west-2\n  security_group: {{IpPermissions: [{rule}]}}\n"
    expected = ["provider.security_group.IpPermissions[0]"] if is_open else []
    assert places(edited(AWS, "  region: us-west-2\n", group)) == expected


def test_the_newer_autoscaler_with_machines_of_ones_own() -> None:
    assert places(edited(LOCAL, "    RAY_enable_autoscaler_v2=0\n", "")) == [HEAD]
    assert places(edited(LOCAL, "    RAY_enable_autoscaler_v2=0", "    RAY_enable_autoscaler_v2=1")) == [HEAD]


def test_what_ray_does_where_the_file_says_nothing_is_judged_too() -> None:
    before, _, _ = AWS.partition("# Variables that are set before `ray start`")
    wheres = [(each.where, each.value) for each in found(before)]
    assert wheres == [
        ("head_start_ray_commands", "--dashboard-host=0.0.0.0"),
        ("head_start_ray_commands", "no RAY_AUTH_MODE"),
        ("worker_start_ray_commands", "no RAY_AUTH_MODE"),
    ]


def test_reading_flags_and_variables() -> None:
    assert flag_of("ray start --num-cpus=8 --port 5", "--num-cpus") == "8"
    assert flag_of("ray start --num-cpus=8 --port 5; x", "--port") == "5"
    assert flag_of("ray start --xport=5", "--port") is None
    assert variable_of("export A=1 B=2; export A=3; ray", "A") == "3"
    assert variable_of("export XA=1; ray start --A=1", "A") is None
    assert variable_of("export A=; ray", "A") == ""
