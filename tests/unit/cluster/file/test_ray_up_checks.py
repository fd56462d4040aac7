"""Files of `ray up`: what Ray refuses, and what Ray accepts and a person would find out later. Each edit is one mistake."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import yaml

from raytrain.cluster.file.ray_validation import ray_error
from tests.unit.cluster.file.support import edited, found, places, rendered

KEY = "~/.ssh/id_ed25519"
TYPES, CONFIG = "available_node_types", "available_node_types.head.node_config"
HEAD, WORKER = "head_start_ray_commands[1]", "worker_start_ray_commands[1]"
FILES = {
    "aws": rendered("aws"),
    "key": rendered("aws", ssh_key=KEY, on_demand=0),
    "spot": rendered("aws", on_demand=0),
    "gcp": rendered("gcp", on_demand=0),
    "azure": rendered("azure", ssh_key=KEY),
    "local": rendered("local", setup="none"),
}
AWS, ZERO = FILES["aws"], "resources: {CPU: 0, GPU: 0}"
FILES["silent"] = edited(AWS, ZERO, "resources: {}")
FILES["tokenless"] = edited(AWS, "  ~/.ray/auth_token: ~/.ray/auth_token\n", "")
ONE = "    resources: {CPU: 4, GPU: 1}\n"
MACHINE = "InstanceType: m5.xlarge\n"
SCHEDULING = "scheduling: {onHostMaintenance: TERMINATE, automaticRestart: false}"


@pytest.mark.parametrize(
    ("old", "new", "where", "fix"),
    [
        ("cluster_name: raytrain\n", "", "cluster_name", "add cluster_name: here"),
        ("max_workers: 10", "max_workers: -1", "max_workers", "give another value"),
        ("max_workers: 10", "min_workers: 1\nmax_workers: 10", "min_workers", "did you mean max_workers?"),
        ("type: aws", "type: awss", "provider.type", "did you mean aws?"),
        ("type: aws", "tpye: aws", "provider.type", "add type: here"),
        ("idle_timeout_minutes: 5", "idle_timeout_minutes: 5\nxyz: 1", "xyz", "remove it"),
        ("idle_timeout_minutes: 5", "idle_timeout_minutes: 5\n1: x", "1", "put it in quotes, or choose another name"),
        ("idle_timeout_minutes: 5", "idle_timeout_minutes: '5'", "idle_timeout_minutes", "write 5 without quotes"),
        ("priority: 10", "prioritty: 10", f"{TYPES}.spot.prioritty", "did you mean priority?"),
        ("head_node_type: head", "head_node_type: xyz", "head_node_type", "write one of head, spot, on-demand"),
    ],
)
def test_what_ray_would_refuse_has_a_place_and_a_fix(old: str, new: str, where: str, fix: str) -> None:
    assert (where, fix) in [(each.where, each.fix) for each in found(edited(AWS, old, new))]


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("aws", "idle_timeout_minutes: 5", "idle_timeout_minutes: 5\n1: x", ["1"]),
        ("gcp", "    resources: {CPU: 8, GPU: 1}\n", "", [f"{TYPES}.spot.resources"]),
        ("local", "  head_ip: 10.77.0.1\n", "", ["provider.head_ip"]),
        ("local", "  worker_ips: [10.77.0.2, 10.77.0.3]\n", "", ["provider.worker_ips"]),
        ("local", "worker_ips: [10.77.0.2", "worker_ips: [10.77.0.1", ["provider.worker_ips"]),
        ("local", "setup_commands: []", f"{TYPES}: {{a: {{resources: {{}}, node_config: {{}}}}}}", [TYPES]),
        ("local", "setup_commands: []", "min_workers: 1", []),
        # a head that stays and never trains
        ("azure", "_D4s_v5\n", "_D4s_v5\n        priority: Spot\n", [f"{CONFIG}.azure_arm_parameters.priority"]),
        ("gcp", SCHEDULING, "scheduling: [{preemptible: true}, {a: 1}]", [f"{CONFIG}.scheduling"]),
        ("gcp", SCHEDULING, "scheduling: {provisioningModel: SPOT}", [f"{CONFIG}.scheduling"]),
        *(("aws", ZERO, "resources: {CPU: 0, GPU: 1}", [f"{TYPES}.head.resources.GPU"]), ("aws", ZERO, "resources: {}", [])),
        *(("silent", "    --num-cpus=0\n", "", [HEAD]), ("silent", "--num-cpus=0", "--num-cpus 4", [HEAD])),
        *(("silent", "--num-cpus=0", "--num-cpus '0';", []), ("local", "    --num-cpus=0\n", "", [HEAD])),
        ("local", "--num-gpus=0", "--num-gpus=1", [HEAD]),
        # workers
        ("spot", "    max_workers: 8\n    priority", "    max_workers: 0\n    priority", [TYPES]),
        *(("aws", "max_workers: 10\n", "", ["max_workers"]), ("aws", ONE, "", [])),
        ("aws", f"{ONE}    min_workers: 0\n    max_workers: 8", "    resources: {GPU: 0}", [f"{TYPES}.spot"]),
        # Ray starts, and nodes find each other
        ("aws", "    ray start\n    --head\n", "    ray start\n", [HEAD]),
        ("aws", "    ray start\n    --head\n", "    echo\n", [HEAD.removesuffix("[1]")]),
        ("aws", "    ray start\n    --address", "    echo\n    --address", [WORKER.removesuffix("[1]")]),
        ("aws", "    --address=$RAY_HEAD_IP:6379\n", "", [WORKER]),
        ("aws", "--address=$RAY_HEAD_IP:6379", "--address=10.0.0.1:6379", [WORKER]),
        ("aws", "--address=$RAY_HEAD_IP:6379", "--address=$RAY_HEAD_IP", [WORKER]),
        ("aws", "--address=$RAY_HEAD_IP:6379", '--address "${RAY_HEAD_IP}:6379"', []),
        ("aws", "    --port=6379\n", "    --port 6400\n", [WORKER]),
        ("aws", "head_start_ray_commands:\n  - ray stop\n", "head_start_ray_commands:\n", ["head_start_ray_commands[0]"]),
        ("local", "    RAY_enable_autoscaler_v2=0", "    RAY_enable_autoscaler_v2=1", [HEAD]),
        # who gets in, and files on this machine
        ("aws", "  ~/.ray/auth_token: ~/.ray/auth_token\n", "", ["file_mounts"]),
        ("aws", "  ~/.ray/auth_token: ~/", "  /home/ubuntu/.ray/auth_token: ~/", []),
        ("aws", "--dashboard-host=127.0.0.1", "--dashboard-host=0.0.0.0", []),
        ("aws", "    RAY_AUTH_MODE=token\n", "", [HEAD, WORKER]),
        ("aws", "RAY_AUTH_MODE=token\n", "RAY_AUTH_MODE=disabled\n", [HEAD, WORKER]),
        ("aws", "RAY_AUTH_MODE=token\n", "RAY_AUTH_MODE=disabled RAY_AUTH_MODE=token\n", []),
        ("tokenless", "RAY_AUTH_MODE=token\n", "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/x\n", []),
        # one cloud alone
        ("key", "      KeyName: id_ed25519\n", "", [f"{TYPES}.{name}.node_config.KeyName" for name in ("head", "spot")]),
        ("key", "ImageId: ", "LaunchTemplate: ", []),
        ("key", "ImageId: ", "UserData: ", [f"{TYPES}.{name}.node_config.ImageId" for name in ("head", "spot")]),
        ("aws", MACHINE, MACHINE + "      IamInstanceProfil: a\n", [f"{CONFIG}.IamInstanceProfil"]),
        ("aws", MACHINE, MACHINE + "      SubnetIds: [a]\n      CpuOptions: {}\n", []),
        ("azure", f", ssh_public_key: {KEY}.pub", "", ["auth.ssh_public_key"]),
        ("gcp", ", project_id: my-project", "", ["provider.project_id"]),
    ],
)
def test_exactly_the_mistakes_of_an_edit_are_found(file: str, old: str, new: str, expected: list[str]) -> None:
    assert old in FILES[file]
    assert places(FILES[file].replace(old, new)) == expected


def test_keys_and_token_that_are_not_on_this_machine() -> None:
    assert places(FILES["key"], exists=lambda path: path != KEY) == ["auth.ssh_private_key"]
    assert places(FILES["azure"], exists=lambda path: not path.endswith(".pub")) == ["auth.ssh_public_key"]
    (mistake,) = found(AWS, exists=lambda path: path != "~/.ray/auth_token")
    assert (mistake.where, mistake.fix) == ("file_mounts.~/.ray/auth_token", "run: ray get-auth-token --generate")


@pytest.mark.parametrize(
    "rule",
    [
        "{FromPort: 22, ToPort: 65535, IpRanges: [{CidrIp: 0.0.0.0/0}]}",
        "{FromPort: 8265, ToPort: 8265, Ipv6Ranges: [{CidrIpv6: '::/0'}]}",
        "{IpProtocol: '-1', IpRanges: [{CidrIp: 10.0.0.0/8}, {CidrIp: 0.0.0.0/0}]}",
    ],
)
def test_only_ssh_may_be_open_to_the_world(rule: str) -> None:
    group = f"  region: us-west-2\n  security_group: {{IpPermissions: [{rule}]}}\n"
    assert places(edited(AWS, "  region: us-west-2\n", group)) == ["provider.security_group.IpPermissions[0]"]


def test_what_ray_does_where_the_file_says_nothing_is_checked_too() -> None:
    before, _, _ = AWS.partition("# Variables that are set before `ray start`")
    assert [(each.where, each.value) for each in found(before)] == [
        *(("head_start_ray_commands", "--dashboard-host=0.0.0.0"), ("head_start_ray_commands", "no RAY_AUTH_MODE")),
        ("worker_start_ray_commands", "no RAY_AUTH_MODE"),
    ]


@pytest.mark.parametrize(
    ("provider", "settings", "workers", "value"),
    [
        *(("aws", {}, (1, 10), None), ("aws", {}, (1, 11), "room for 10 workers")),
        ("aws", {"workers": "4:64"}, (1, 2), "4 workers always there"),
        ("aws", {"worker_gpus": 8, "workers": "0:8", "on_demand": 0}, (4, 64), None),
        ("aws", {"worker_gpus": 8, "workers": "0:7", "on_demand": 0}, (4, 64), "room for 56 workers"),
        ("aws", {"worker_gpus": 0, "workers": "0:2", "on_demand": 0}, (1, 8), None),
        ("aws", {"worker_gpus": 0, "workers": "0:2", "on_demand": 0}, (1, 9), "room for 8 workers"),
        *(("local", {}, (1, 1000), None), ("local", {"worker_cpus": 4}, (1, 8), None)),
        ("local", {"worker_cpus": 4}, (1, 9), "room for 8 workers"),
        *(("local", {"worker_cpus": 4, "worker_gpus": 1}, (1, 8), "room for 2 workers"), ("kubernetes", {}, (1, 8), None)),
        *(("kubernetes", {}, (1, 9), "room for 8 workers"), ("kubernetes", {"worker_gpus": 8}, (4, 64), None)),
        ("kubernetes", {"worker_gpus": 0, "worker_cpus": 2}, (4, 17), "room for 16 workers"),
    ],
)
def test_whether_the_run_fits(provider: str, settings: dict[str, Any], workers: tuple[int, int], value: str | None) -> None:
    values = [each.value for each in found(rendered(provider, **settings), workers=workers)]
    assert values == ([value] if value else [])


def test_the_limit_of_all_types_counts_and_unknown_sizes_are_not_guessed() -> None:
    (mistake,) = found(edited(AWS, "max_workers: 10\n", "max_workers: 3\n"), workers=(1, 8))
    assert mistake.value == "room for 3 workers"
    large = edited(AWS, "max_workers: 10\n", "max_workers: 3\n")[::-1].replace("{CPU: 4, GPU: 1}"[::-1], "{GPU: 8}"[::-1], 1)
    assert [each.value for each in found(large[::-1], workers=(1, 18))] == ["room for 17 workers"]
    assert found(AWS.replace(ONE, ""), workers=(1, 1000)) == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"provider": {"type": "nope"}}, "Unsupported node provider"),
        ({"cluster_name": "a", "provider": {"type": "local"}}, "head_ip"),
        *(({"cluster_name": 3, "provider": {"type": "aws"}}, "3 is not of type 'string'"), ([1], "AttributeError")),
    ],
)
def test_whatever_ray_raises_is_a_text_and_ray_prints_nothing(
    config: Any, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert words in ray_error(config)
    assert capfd.readouterr() == ("", "")
    assert logging.root.manager.disable == logging.NOTSET


def test_rays_own_check_is_asked_last_and_changes_nothing() -> None:
    docker = "idle_timeout_minutes: 5\ndocker: {image: rayproject/ray:2.60.0-py311}\n"
    (mistake,) = found(edited(AWS, "idle_timeout_minutes: 5\n", docker))
    assert mistake.where == "provider"
    assert "container" in mistake.value
    for text in (AWS, FILES["local"]):
        config = yaml.safe_load(text)
        assert ray_error(config) == ""
        assert config == yaml.safe_load(text)
