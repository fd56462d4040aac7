"""The manifests of a cluster on Kubernetes, and of a job on it, for the KubeRay operator 1.5.1 or newer. Pure."""

from __future__ import annotations

from typing import Any

from raytrain.cluster.file.commands import COMMON, HEALTH, PRELOAD, RECONNECT
from raytrain.cluster.file.setup import RAY
from raytrain.cluster.file.spec import ClusterSpec

IMAGE = "raytrain:latest"
HEADER = """\
# A Ray cluster on Kubernetes for elastic training, and a job; written by `raytrain cluster render --provider kubernetes`.
# Needs the KubeRay operator, 1.5.1 or newer.
#   kubectl apply -f FILE    start both
#   kubectl delete -f FILE   stop both
#   kubectl -n {namespace} logs -f -l job-name={name}-job
#       what the job says
#   kubectl -n {namespace} port-forward svc/{name}-head-svc 8265:8265
#       the dashboard, on localhost:8265
#
# Look at, or change, first: the image (all pods run the same one), the job's entrypoint, and where the pods of workers may
# run (nodeSelector, tolerations). An image with raytrain and a job in it is built from this Dockerfile:
#   FROM rayproject/ray:{ray}-py{python}-gpu
#   COPY --chown=ray . /home/ray/raytrain
#   RUN pip install --no-cache-dir -e /home/ray/raytrain
#   WORKDIR /home/ray/raytrain"""
TOKEN = """\
# Ray's token authentication. KubeRay makes a token, and gives it to all pods and to the job; to read it:
# kubectl -n {namespace} get secret {name} -o jsonpath='{{.data.auth_token}}' | base64 -d"""


def kubernetes(spec: ClusterSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """The RayCluster and the RayJob, in their order; keys that begin with '# ' are comments."""
    return _cluster(spec), _job(spec)


def _cluster(spec: ClusterSpec) -> dict[str, Any]:
    header = HEADER.format(name=spec.name, namespace=spec.namespace, ray=RAY, python=spec.python.replace(".", ""))
    return {
        header: None,
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": spec.name, "namespace": spec.namespace},
        "spec": {
            "rayVersion": RAY,
            TOKEN.format(name=spec.name, namespace=spec.namespace): None,
            "authOptions": {"mode": "token"},
            "enableInTreeAutoscaling": True,
            "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": 300},
            "headGroupSpec": {
                "# num-cpus 0: Ray places nothing on the head, so it never trains.": None,
                "rayStartParams": {"num-cpus": str(spec.head_cpus), "num-gpus": "0", **_store(spec)},
                "template": {"spec": _head_pod(spec)},
            },
            "workerGroupSpecs": [_workers(spec)],
        },
    }


def _head_pod(spec: ClusterSpec) -> dict[str, Any]:
    ports = {"gcs": 6379, "dashboard": 8265, "client": 10001}
    container = {
        "name": "ray-head",
        "image": spec.image or IMAGE,
        "env": _environment({**COMMON, **HEALTH}),
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "resources": _same({"cpu": "2", "memory": "8Gi"}),
    }
    return {"containers": [container], "restartPolicy": "Never"}


def _workers(spec: ClusterSpec) -> dict[str, Any]:
    low, high = spec.workers
    gpus = 1 if spec.worker_gpus is None else spec.worker_gpus
    has = {"cpu": str(spec.worker_cpus or 4), "memory": f"{spec.worker_memory_gib}Gi"}
    container = {
        "name": "ray-worker",
        "image": spec.image or IMAGE,
        "env": _environment({**COMMON, **RECONNECT, **(PRELOAD if gpus else {})}),
        "resources": _same({**has, **({"nvidia.com/gpu": str(gpus)} if gpus else {})}),
        "# Ray's object store; it counts towards the pod's memory.": None,
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(1, spec.worker_memory_gib * 4 // 10)}Gi"}}
    return {
        "groupName": "workers",
        "replicas": low,
        "minReplicas": low,
        "maxReplicas": high,
        "rayStartParams": _store(spec),
        "template": {"spec": {"containers": [container], "volumes": [shm], "restartPolicy": "Never"}},
    }


def _job(spec: ClusterSpec) -> dict[str, Any]:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": f"{spec.name}-job", "namespace": spec.namespace},
        "spec": {
            "# Runs on the cluster above, and leaves it there.": None,
            "clusterSelector": {"ray.io/cluster": spec.name},
            "entrypoint": f"python jobs/byte_lm.py --run.workers {max(1, spec.workers[0])}:{spec.workers[1]}",
        },
    }


def _environment(variables: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in variables.items() if name != "RAY_AUTH_MODE"]


def _same(amounts: dict[str, str]) -> dict[str, Any]:
    return {"requests": amounts, "limits": dict(amounts)}


def _store(spec: ClusterSpec) -> dict[str, str]:
    return {} if spec.object_store_memory is None else {"object-store-memory": str(spec.object_store_memory)}
