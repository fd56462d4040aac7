"""All mistakes at once: twenty files with one planted mistake each, and files with several."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.golden import check
from tests.unit.cluster.file.support import REPOSITORY, edited, found, rendered

FILES = sorted((Path(__file__).parent / "mistakes").glob("*.yaml"))
PLANTED = {
    "01_yaml_syntax": 5,
    "02_unknown_key": 2,
    "03_wrong_type": 15,
    "04_key_twice": 5,
    "05_unknown_head_type": 5,
    "06_spot_head": 13,
    "07_min_above_global_max": 2,
    "08_min_above_max": 23,
    "09_head_trains": 8,
    "10_other_ray": 32,
    "11_other_python": 31,
    "12_other_torch": 32,
    "13_no_ssh_key": 6,
    "14_no_such_mount": 30,
    "15_open_ports": 9,
    "16_no_token": 35,
    "17_no_autoscaling_config": 35,
    "18_aws_typo": 20,
    "19_local_with_autoscaler_v2": 11,
    "20_kubernetes_without_resources": 26,
}
"""The line of each file's mistake, counted by hand."""


def test_there_are_twenty_files() -> None:
    assert [file.stem for file in FILES] == list(PLANTED)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_exactly_the_planted_mistake_is_found_on_its_line(file: Path) -> None:
    (mistake,) = found(file.read_text(encoding="utf-8"))
    assert mistake.line == PLANTED[file.stem]
    assert all((mistake.where, mistake.value, mistake.rule, mistake.fix))


def test_what_is_said_of_the_twenty_files() -> None:
    told = [each.text(file.name) for file in FILES for each in found(file.read_text(encoding="utf-8"))]
    check("cluster_mistakes.txt", "\n".join(told) + "\n")


def test_r18_cluster_yaml_passes_rays_own_check_twice_and_all_mistakes_are_listed_with_line_and_remedy() -> None:
    text = (REPOSITORY / "cluster.yaml").read_text(encoding="utf-8")
    once = prepare_config(copy.deepcopy(yaml.safe_load(text)))
    validate_config(once)
    validate_config(prepare_config(copy.deepcopy(once)))
    assert found(text) == []

    wrong = edited(text, "cluster_name: raytrain\n", "cluster_name: raytrain\nidle_timeout_minuts: 5\n")
    wrong = edited(wrong, "head_node_type: head", "head_node_type: haed")
    wrong = edited(wrong, "      InstanceType: m5.xlarge\n", "      InstanceTyp: m5.xlarge\n")
    wrong = edited(wrong, "torch==2.13.0", "torch==2.1.0")
    wrong = edited(wrong, "--address=$RAY_HEAD_IP:6379", "--address=$RAY_HEAD_IP:6380")
    lines = wrong.splitlines()
    mistakes = found(wrong)
    assert [each.where for each in mistakes] == [
        "idle_timeout_minuts",
        "head_node_type",
        "available_node_types.head.node_config.InstanceTyp",
        "setup_commands[2]",
        "worker_start_ray_commands[1]",
    ]
    for each, word in zip(mistakes, ("minuts", "haed", "InstanceTyp:", "torch==2.1.0", ">-"), strict=True):
        assert word in lines[each.line - 1]
        assert each.fix


def test_two_documents_are_one_too_many_for_ray_up() -> None:
    text = rendered("aws") + "---\ncluster_name: other\n"
    assert [(each.value, each.line) for each in found(text)] == [("2 documents", text.count("\n"))]


def test_a_text_that_is_no_mapping_is_one_mistake() -> None:
    assert [each.rule for each in found("just words\n")] == ["is a mapping"]


@pytest.mark.parametrize(
    "text",
    [
        "cluster_name: 3\nprovider: aws\navailable_node_types: [a]\nfile_mounts: x\nsetup_commands: pip\nauth: 1\n",
        "provider: {type: gcp, security_group: 3}\navailable_node_types: {a: {node_config: 1, resources: x}, b: null}\n",
        "provider: [1]\nhead_node_type: [a]\nhead_start_ray_commands: {a: 1}\nworker_start_ray_commands: [1, null]\n",
        "provider: {type: 7}\ndocker: 1\nmax_workers: many\navailable_node_types: {1: {}}\nhead_node_type: 1\n",
        "provider: {type: aws, security_group: {IpPermissions: [1, {IpRanges: 5}, {IpRanges: [3]}]}}\ncluster_name: a\n",
        "apiVersion: 3\nkind: [RayCluster]\nspec: 7\n",
        "apiVersion: ray.io/v1\nkind: RayCluster\nspec: {workerGroupSpecs: [1], headGroupSpec: 2, rayVersion: x}\n",
        "apiVersion: ray.io/v1\nkind: RayJob\nspec: {rayClusterSpec: {workerGroupSpecs: [{template: {spec: 1}}]}}\n",
    ],
)
def test_wrong_types_everywhere_give_mistakes_and_no_exception(text: str) -> None:
    assert found(text, workers=(1, 4))
