"""Kubernetes manifests: would they give a cluster for elastic training?"""

from __future__ import annotations

import pytest

from tests.unit.cluster.file.support import edited, found, rendered

TEXT = rendered("kubernetes")
GROUP = "spec.workerGroupSpecs[0]"
POD = "template.spec.containers[0]"
LIMITS = "                limits: {cpu: '4', memory: 32Gi, nvidia.com/gpu: '1'}\n"
JOB = """\
apiVersion: ray.io/v1
kind: RayJob
metadata: {name: j}
spec:
  entrypoint: python job.py
  rayClusterSpec:
"""


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("kind: RayCluster\n", "kind: RayClaster\n", "kind"),
        ("kind: RayCluster\n", "", "kind"),
        ("apiVersion: ray.io/v1\nkind: RayCluster", "apiVersion: ray.io/v1alpha1\nkind: RayCluster", "apiVersion"),
        ("minReplicas: 0", "minReplicas: 9", f"{GROUP}.minReplicas"),
        ("      replicas: 0\n", "      replicas: 9\n", f"{GROUP}.replicas"),
        (LIMITS, "", f"{GROUP}.{POD}.resources"),
        (LIMITS, "                limits: {cpu: '4'}\n", f"{GROUP}.{POD}.resources"),
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
def test_each_planted_mistake_is_the_one_that_is_found(old: str, new: str, where: str) -> None:
    assert [each.where for each in found(edited(TEXT, old, new))] == [where]


def test_images_with_other_versions() -> None:
    text = edited(TEXT, "image: raytrain:latest", "image: rayproject/ray:2.9.0-py39", count=2)
    assert [(each.where, each.value) for each in found(text)] == [
        (f"spec.headGroupSpec.{POD}.image", "Python 3.9"),
        (f"spec.headGroupSpec.{POD}.image", "Ray 2.9.0"),
        (f"{GROUP}.{POD}.image", "Python 3.9"),
        (f"{GROUP}.{POD}.image", "Ray 2.9.0"),
    ]


def test_a_token_by_variables_is_a_token_too() -> None:
    variable = "              - {name: RAY_AUTH_MODE, value: token}\n              - {name: RAY_ACCEL"
    text = edited(TEXT, "  authOptions: {mode: token}\n", "")
    one = text.replace("              - {name: RAY_ACCEL", variable, 1)
    assert [each.where for each in found(one)] == ["spec.authOptions"]
    assert (
        found(edited(one, "                - {name: RAY_ACCEL", variable.replace("              -", "                -")))
        == []
    )


def test_a_cluster_inside_a_job_is_read_too() -> None:
    cluster = edited(TEXT.partition("---\n")[0], "minReplicas: 0", "minReplicas: 9").partition("\nspec:\n")[2]
    text = JOB + "".join(f"  {line}\n" for line in cluster.splitlines())
    assert [each.where for each in found(text)] == ["spec.rayClusterSpec.workerGroupSpecs[0].minReplicas"]


@pytest.mark.parametrize(
    ("settings", "workers", "value"),
    [
        ({}, (1, 8), None),
        ({}, (1, 9), "room for 8 workers"),
        ({"worker_gpus": 8}, (4, 64), None),
        ({"worker_gpus": 0, "worker_cpus": 2}, (4, 17), "room for 16 workers"),
    ],
)
def test_whether_the_run_fits(settings: dict[str, int], workers: tuple[int, int], value: str | None) -> None:
    values = [each.value for each in found(rendered("kubernetes", **settings), workers=workers)]
    assert values == ([value] if value else [])


def test_other_objects_beside_them_are_left_alone() -> None:
    assert found(TEXT + "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {a: b}\n") == []
