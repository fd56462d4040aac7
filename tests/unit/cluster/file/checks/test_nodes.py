"""Machines: a head that stays and never trains, workers that can, and enough of them for the run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.cluster.file.support import edited, found, rendered

AWS = rendered("aws")
LOCAL = rendered("local", setup="none")
TYPES = "available_node_types"
MARKET = "      InstanceMarketOptions: {MarketType: spot}\n"


def places(text: str, **facts: Any) -> list[str]:
    return [each.where for each in found(text, **facts)]


@pytest.mark.parametrize(
    ("provider", "old", "new", "where"),
    [
        ("aws", "InstanceType: m5.xlarge\n", "InstanceType: m5.xlarge\n" + MARKET, "InstanceMarketOptions"),
        (
            "azure",
            "vmSize: Standard_D4s_v5\n",
            "vmSize: Standard_D4s_v5\n        priority: Spot\n",
            "azure_arm_parameters.priority",
        ),
    ],
)
def test_a_spot_head_is_found_with_each_cloud(provider: str, old: str, new: str, where: str) -> None:
    assert places(edited(rendered(provider), old, new)) == [f"{TYPES}.head.node_config.{where}"]


@pytest.mark.parametrize(
    "scheduling",
    ["[{preemptible: true}, {onHostMaintenance: TERMINATE}]", "{provisioningModel: SPOT}", "{preemptible: true}"],
)
def test_a_spot_head_on_google_cloud_however_it_is_written(scheduling: str) -> None:
    text, old = rendered("gcp"), "scheduling: {onHostMaintenance: TERMINATE, automaticRestart: false}"
    first = text.replace(old, f"scheduling: {scheduling}", 1)
    assert places(first) == [f"{TYPES}.head.node_config.scheduling"]


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("resources: {CPU: 0, GPU: 0}", "resources: {CPU: 2, GPU: 0}", f"{TYPES}.head.resources.CPU"),
        ("resources: {CPU: 0, GPU: 0}", "resources: {CPU: 0, GPU: 1}", f"{TYPES}.head.resources.GPU"),
        ("InstanceType: m5.xlarge", "InstanceType: g5.xlarge", ""),
    ],
)
def test_a_head_that_trains(old: str, new: str, where: str) -> None:
    assert places(edited(AWS, old, new)) == ([where] if where else [])


def test_a_head_whose_resources_are_not_stated_follows_its_start_command() -> None:
    silent = edited(AWS, "resources: {CPU: 0, GPU: 0}", "resources: {}")
    assert places(silent) == []
    assert places(edited(silent, "    --num-cpus=0\n", "")) == ["head_start_ray_commands[1]"]
    assert places(edited(silent, "--num-cpus=0", "--num-cpus 4")) == ["head_start_ray_commands[1]"]
    gpu = edited(silent, "InstanceType: m5.xlarge", "InstanceType: g5.xlarge")
    assert places(edited(gpu, "    --num-gpus=0\n", "")) == ["head_start_ray_commands[1]"]


def test_a_local_head_that_trains() -> None:
    assert [each.value for each in found(edited(LOCAL, "    --num-cpus=0\n", ""))] == ["all of its CPUs"]
    assert [each.value for each in found(edited(LOCAL, "--num-cpus=0", "--num-cpus=4"))] == ["4 CPUs"]
    assert [each.value for each in found(edited(LOCAL, "--num-gpus=0", "--num-gpus=1"))] == ["1 GPUs"]


def test_a_file_without_workers() -> None:
    text = rendered("aws", on_demand=0)
    assert places(edited(text, "    max_workers: 8\n    priority", "    max_workers: 0\n    priority")) == [TYPES]


def test_a_machine_that_does_not_have_what_is_stated() -> None:
    wrong = AWS.replace("resources: {CPU: 4, GPU: 1}", "resources: {CPU: 4, GPU: 8}", 1)
    assert [(each.where, each.fix) for each in found(wrong)] == [
        (f"{TYPES}.spot.resources.GPU", "write 1, or choose another machine type")
    ]
    assert places(wrong.replace("InstanceType: g5.xlarge", "InstanceType: new.xlarge", 1)) == []


def test_a_type_without_gpus_beside_one_that_has_them() -> None:
    wrong = AWS.replace("resources: {CPU: 4, GPU: 1}", "resources: {CPU: 4, GPU: 0}", 1)
    wrong = wrong.replace("InstanceType: g5.xlarge", "InstanceType: m5.xlarge", 1)
    assert places(wrong) == [f"{TYPES}.spot"]


def test_rays_own_limit_where_the_file_has_none() -> None:
    assert [(each.where, each.fix) for each in found(edited(AWS, "max_workers: 10\n", ""))] == [
        ("max_workers", "add max_workers: 10")
    ]


@pytest.mark.parametrize(
    ("settings", "workers", "value"),
    [
        ({}, (1, 10), None),
        ({}, (1, 11), "room for 10 workers"),
        ({"workers": "4:64"}, (4, 64), None),
        ({"workers": "4:64"}, (1, 2), "4 workers always there"),
        ({"worker_machine": "p4d.24xlarge", "workers": "0:8", "on_demand": 0}, (4, 64), None),
        ({"worker_machine": "p4d.24xlarge", "workers": "0:7", "on_demand": 0}, (4, 64), "room for 56 workers"),
        ({"worker_machine": "m5.xlarge", "workers": "0:2", "on_demand": 0}, (1, 8), None),
        ({"worker_machine": "m5.xlarge", "workers": "0:2", "on_demand": 0}, (1, 9), "room for 8 workers"),
    ],
)
def test_whether_the_run_fits(settings: dict[str, Any], workers: tuple[int, int], value: str | None) -> None:
    values = [each.value for each in found(rendered("aws", **settings), workers=workers)]
    assert values == ([value] if value else [])


def test_the_limit_of_all_types_together_counts() -> None:
    text = edited(AWS, "max_workers: 10\n", "max_workers: 3\n")
    assert [each.value for each in found(text, workers=(1, 8))] == ["room for 3 workers"]


@pytest.mark.parametrize(
    ("settings", "workers", "value"),
    [
        ({"worker_cpus": 4}, (1, 8), None),
        ({"worker_cpus": 4}, (1, 9), "room for 8 workers"),
        ({"worker_cpus": 4, "worker_gpus": 1}, (1, 8), "room for 2 workers"),
    ],
)
def test_whether_the_run_fits_on_machines_of_ones_own(
    settings: dict[str, int], workers: tuple[int, int], value: str | None
) -> None:
    values = [each.value for each in found(rendered("local", setup="none", **settings), workers=workers)]
    assert values == ([value] if value else [])


def test_what_cannot_be_known_is_not_claimed() -> None:
    text = AWS.replace("resources: {CPU: 4, GPU: 1}", "resources: {}").replace("g5.xlarge", "new.xlarge")
    assert found(text, workers=(1, 1000)) == []
    assert found(LOCAL, workers=(1, 1000)) == []
