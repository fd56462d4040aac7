"""All mistakes at once: twenty files with one planted mistake each, versions, manifests, and files of any content."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.autoscaler._private.util import prepare_config, validate_config

from raytrain.cluster.file.spec import PROVIDERS
from tests.golden import check
from tests.unit.cluster.file.support import REPOSITORY, edited, found, places, rendered

FILES = sorted((Path(__file__).parent / "mistakes").glob("*.yaml"))
LINES = [5, 2, 15, 5, 5, 13, 2, 23, 8, 32, 31, 32, 6, 30, 9, 35, 35, 20, 11, 26]  # of each mistake, counted by hand
AWS, MANIFESTS = rendered("aws"), rendered("kubernetes")
INSTALL = next(line for line in AWS.splitlines() if "uv pip install" in line)
GROUP, POD = "spec.workerGroupSpecs[0]", "template.spec.containers[0]"
LIMITS = "                limits: {cpu: '4', memory: 32Gi, nvidia.com/gpu: '1'}\n"
JOB = "apiVersion: ray.io/v1\nkind: RayJob\nmetadata: {name: j}\nspec:\n  entrypoint: python job.py\n  rayClusterSpec:\n"

ODD = [
    *("null", "true", "-1", "2.5", "''", "text", "[]", "[a]", "[[1]]", "{}", "{1: {b: null}}"),
    "{CPU: [], GPU: {}, limits: 1}",
]


def test_exactly_the_planted_mistake_is_found_on_its_line_with_its_text() -> None:
    listed = [(file.name, each) for file in FILES for each in found(file.read_text(encoding="utf-8"))]
    assert [(name, each.line) for name, each in listed] == [(f.name, line) for f, line in zip(FILES, LINES, strict=True)]
    texts = [each.text(name) for name, each in listed]
    check("cluster_mistakes.txt", "\n".join(texts) + "\n")


def test_r18_cluster_yaml_passes_rays_check_twice() -> None:
    text = (REPOSITORY / "cluster.yaml").read_text(encoding="utf-8")
    once = prepare_config(copy.deepcopy(yaml.safe_load(text)))
    validate_config(once)
    validate_config(prepare_config(copy.deepcopy(once)))
    assert found(text) == []


def test_r18_all_mistakes_are_listed_with_line_and_fix() -> None:
    wrong = (REPOSITORY / "cluster.yaml").read_text(encoding="utf-8")
    for old, new in (
        ("cluster_name: raytrain\n", "cluster_name: raytrain\nidle_timeout_minuts: 5\n"),
        ("head_node_type: head", "head_node_type: haed"),
        *(("      InstanceType: m5.xlarge\n", "      InstanceTyp: m5.xlarge\n"), ("torch==2.13.0", "torch==2.1.0")),
        ("--address=$RAY_HEAD_IP:6379", "--address=$RAY_HEAD_IP:6380"),
    ):
        wrong = edited(wrong, old, new)
    mistakes, lines = found(wrong), wrong.splitlines()
    node_config = "available_node_types.head.node_config"
    commands = ["setup_commands[2]", "worker_start_ray_commands[1]"]
    expected = ["idle_timeout_minuts", "head_node_type", f"{node_config}.InstanceTyp", *commands]
    assert [each.where for each in mistakes] == expected
    for each, word in zip(mistakes, ("minuts", "haed", "InstanceTyp:", "torch==2.1.0", ">-"), strict=True):
        assert word in lines[each.line - 1]
        assert each.fix


def test_a_second_document_or_no_mapping_is_one_mistake() -> None:
    text = AWS + "---\ncluster_name: other\n"
    assert [(each.value, each.line) for each in found(text)] == [("2 documents", text.count("\n"))]
    assert [each.rule for each in found("just words\n")] == ["is a mapping"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        *(("pip install ray==2.60.3", []), ("pip install -U 'ray[default]'", ["pip install -U 'ray[default]'"])),
        ("which ray || pip3 install -U ray", ["which ray || pip3 install -U ray"]),
        *(("pip install ./ray -r ray-requirements.txt", []), ("pip install 'ray @ https://example.org/ray.whl'", [])),
        *(("pip install torch==2.13.0+cu130 torchvision==0.1", []), ("uv venv --python=3.14 ~/v", ["Python 3.14"])),
        ("uv venv --python 3.10 ~/v", []),
        ("conda create python=3.8 && pip install ray==2.1.0 torch==1.1", ["Python 3.8", "Ray 2.1.0", "torch==1.1"]),
    ],
)
def test_versions_that_setup_commands_install(command: str, expected: list[str]) -> None:
    assert [each.value for each in found(edited(AWS, INSTALL, f"  - {command}"))] == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("head_setup_commands: [pip install torch==1.0]", ["head_setup_commands[0]"]),
        ("docker: {image: 'rayproject/ray-ml:2.9.0-py39', container_name: ray}", ["docker.image"] * 2),
        ("docker: {image: 'rayproject/ray:latest', container_name: ray}", []),
    ],
)
def test_versions_are_read_wherever_they_stand(line: str, expected: list[str]) -> None:
    assert places(f"{AWS}{line}\n") == expected
    in_type = edited(AWS, "    priority: 10\n", "    priority: 10\n    worker_setup_commands: [pip install ray==1.0]\n")
    assert places(in_type) == ["available_node_types.spot.worker_setup_commands[0]"]


def test_the_ray_that_is_installed_here_decides() -> None:
    assert [each.fix for each in found(AWS, ray="2.61.1")] == ["write 2.61.1"]


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        *(("kind: RayCluster\n", "kind: RayClaster\n", "kind"), ("kind: RayCluster\n", "", "kind")),
        ("apiVersion: ray.io/v1\nkind: RayCluster", "apiVersion: ray.io/v1alpha1\nkind: RayCluster", "apiVersion"),
        ("minReplicas: 0", "minReplicas: 9", f"{GROUP}.minReplicas"),
        ("      replicas: 0\n", "      replicas: 9\n", f"{GROUP}.replicas"),
        (LIMITS, "                limits: {cpu: '4'}\n", f"{GROUP}.{POD}.resources"),
        ("containers:\n          - name: ray-head", "init:\n          - name: ray-head", f"spec.headGroupSpec.{POD[:-3]}"),
        ("num-cpus: '0'", "num-cpus: '2'", "spec.headGroupSpec.rayStartParams.num-cpus"),
        ("{num-cpus: '0', num-gpus: '0'}", "{num-gpus: '0'}", "spec.headGroupSpec.rayStartParams.num-cpus"),
        ("num-cpus: '0'", "num-cpus: 0", "spec.headGroupSpec.rayStartParams.num-cpus"),
        ("rayVersion: 2.60.0", "rayVersion: 2.9.0", "spec.rayVersion"),
        ("rayVersion: 2.60.0", "rayVersion: newest", "spec.rayVersion"),
        ("  authOptions: {mode: token}\n", "", "spec.authOptions"),
        ("authOptions: {mode: token}", "authOptions: {mode: disabled}", "spec.authOptions.mode"),
        ("  enableInTreeAutoscaling: true\n", "", "spec.enableInTreeAutoscaling"),
        ("mountPath: /dev/shm", "mountPath: /data", f"{GROUP}.{POD}.volumeMounts"),
        ("  workerGroupSpecs:", "  workerGroups:", "spec.workerGroupSpecs"),
        ("  entrypoint: python", "  entry: python", "spec.entrypoint"),
        ("  clusterSelector: {ray.io/cluster: raytrain}\n", "", "spec"),
        ("maxReplicas: 8\n", "maxReplicas: 8\n      maxReplicas: 9\n", f"{GROUP}.maxReplicas"),
    ],
)
def test_exactly_the_planted_mistake_of_a_manifest_is_found(old: str, new: str, where: str) -> None:
    assert places(edited(MANIFESTS, old, new)) == [where]


def test_images_of_manifests_are_read_too() -> None:
    text = edited(MANIFESTS, "image: raytrain:latest", "image: rayproject/ray:2.9.0-py39", count=2)
    values = [(each.where.partition(".template")[0], each.value) for each in found(text)]
    assert values == [(place, value) for place in ("spec.headGroupSpec", GROUP) for value in ("Python 3.9", "Ray 2.9.0")]


def test_a_token_by_variables_is_a_token_too() -> None:
    head, worker = "              - {name: RAY_ACCEL", "                - {name: RAY_ACCEL"
    one = edited(MANIFESTS, "  authOptions: {mode: token}\n", "")
    one = edited(one, f"\n{head}", "\n              - {name: RAY_AUTH_MODE, value: token}\n" + head)
    assert places(one) == ["spec.authOptions"]
    assert found(edited(one, f"\n{worker}", "\n                - {name: RAY_AUTH_MODE, value: token}\n" + worker)) == []


def test_a_cluster_inside_a_job_is_checked_and_other_kinds_are_not() -> None:
    cluster = edited(MANIFESTS.partition("---\n")[0], "minReplicas: 0", "minReplicas: 9").partition("\nspec:\n")[2]
    text = JOB + "".join(f"  {line}\n" for line in cluster.splitlines())
    assert places(text) == ["spec.rayClusterSpec.workerGroupSpecs[0].minReplicas"]
    assert found(MANIFESTS + "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {a: b}\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "cluster_name: 3\nprovider: aws\navailable_node_types: [a]\nfile_mounts: x\nsetup_commands: pip\nauth: 1\n",
        "provider: {type: gcp, security_group: 3}\navailable_node_types: {a: {node_config: 1, resources: x}, b: null}\n",
        "provider: {type: aws, security_group: {IpPermissions: [1, {IpRanges: 5}, {IpRanges: [3]}]}}\ncluster_name: a\n",
        "apiVersion: ray.io/v1\nkind: RayCluster\nspec: {workerGroupSpecs: [1], headGroupSpec: 2, rayVersion: x}\n",
        "apiVersion: ray.io/v1\nkind: RayJob\nspec: {rayClusterSpec: {workerGroupSpecs: [{template: {spec: 1}}]}}\n",
    ],
)
def test_wrong_types_everywhere_are_mistakes_and_no_exception(text: str) -> None:
    assert found(text, workers=(1, 4))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(PROVIDERS), st.data())
def test_the_check_never_raises_whatever_becomes_of_a_line(provider: str, data: st.DataObject) -> None:
    lines = [line for line in rendered(provider).splitlines() if not line.lstrip().startswith("#")]
    for _ in range(data.draw(st.integers(1, 2))):
        index = data.draw(st.integers(0, len(lines) - 1))
        line, change = lines[index], data.draw(st.sampled_from(["drop", "indent", "outdent", "twice", *ODD]))
        others = {"drop": [], "indent": [f"  {line}"], "outdent": [line[2:]], "twice": [line, line]}
        inner = next((i for i, each in enumerate(lines[index + 1 :]) if _indent(each) <= _indent(line)), 0)
        end = index + 1 if change in others else index + 1 + inner
        lines[index:end] = others.get(change, [f"{line.partition(':')[0]}: {change}"])
    text = "\n".join(lines) + "\n"
    assert all(1 <= mistake.line <= len(lines) + 1 for mistake in found(text, workers=(1, 4)))
