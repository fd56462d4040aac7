"""What is in the cluster file of each provider: AWS, Google Cloud, Azure, machines of one's own, and Kubernetes?

The functions give the content in the order of the file; keys that begin with '# ' are comments. Pure: the same spec gives
the same text. Whether a file is right is the question of `checks`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from raytrain.cluster.file import commands
from raytrain.cluster.file.commands import COMMON, HEALTH, PRELOAD, RAY, RECONNECT, TOKEN_FILE
from raytrain.cluster.file.document import to_yaml
from raytrain.cluster.file.spec import ClusterSpec, check_spec, flag_name
from raytrain.errors import ConfigError

AWS_IMAGE = "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
"""Where AWS publishes, for each region, the id of its newest image with Ubuntu 22.04 and NVIDIA's driver."""
GCP_IMAGE = "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2404-nvidia-580"
AZURE_IMAGE = "microsoft-dsvm:ubuntu-hpc:2204:latest"

CLOUD_HEADER = """\
# A Ray cluster for elastic training; written by `raytrain cluster render --provider {provider}`.
#
# On the machine where you run `ray`, once:  ray get-auth-token --generate   (writes ~/.ray/auth_token)
# `ray up` needs there:  ssh, rsync, pip install {tools}
#   ray up -y FILE          start it, or bring it to what this file says (from the directory with raytrain's sources)
#   ray dashboard FILE      forward the dashboard and the job server to localhost:8265
#   RAY_AUTH_MODE=token ray job submit --address http://localhost:8265 --working-dir . -- python job.py --run.workers 1:8
#   ray down -y FILE        stop it and stop paying
# `raytrain cluster check FILE` finds mistakes before you wait, and pay, for them.
#
# Look at, or change, first:
{edit}
#
# Ports: nodes reach each other on all ports; from outside only ssh is open, and that to everybody. The dashboard listens on
# the head's localhost. Every message needs the token of ~/.ray/auth_token, which goes to all nodes.
"""

SECOND_CHOICE = """\
# Second choice: the same machine on demand. Ray's autoscaler starts, of the types that fit equally well, the one with
# the higher priority that is below its max_workers. Ray 2.60 does not turn to the next type when the cloud refuses a
# machine: it asks for the same type again. So these come when all {spot} spot machines are there; while no more of those
# are to be had, lower their max_workers to the number that there are and run `ray up -y --no-restart FILE`."""

STARTING = """\
# Variables that are set before `ray start` reach all processes of that node. RAY_health_check_*: a dead node is noticed
# within seconds, not a minute. RAY_preload_python_modules: worker processes import it before they are asked for."""

LOCAL_HEADER = """\
# A Ray cluster on machines of your own, reached by ssh; written by `raytrain cluster render --provider local`.
#
# On the machine where you run `ray`, once:  ray get-auth-token --generate   (writes ~/.ray/auth_token)
# `ray up` needs ssh and rsync, there and on all hosts.
#   ray up -y FILE          start it, or bring it to what this file says
#   ray dashboard FILE      forward the dashboard and the job server to localhost:8265
#   RAY_AUTH_MODE=token ray job submit --address http://localhost:8265 --working-dir . -- python job.py
#   ray down -y FILE        stop it; workers notice within 10 s that their head is gone
# `raytrain cluster check FILE` finds mistakes before you wait for them.
#
# Ports: nodes need to reach each other on all ports, since Ray chooses most of them (the head's are 6379 and 10001, and 8265
# on its localhost for the dashboard). From outside ssh is enough.
# The token keeps others out; it is not encrypted on the way, so keep the network private.
"""

KUBERNETES_HEADER = """\
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
#   WORKDIR /home/ray/raytrain
"""

KUBERNETES_TOKEN = """\
# Ray's token authentication. KubeRay makes a token, and gives it to all pods and to the job; to read it:
# kubectl -n {namespace} get secret {name} -o jsonpath='{{.data.auth_token}}' | base64 -d"""


def render(spec: ClusterSpec) -> str:
    """The file for `ray up`, or the manifests for `kubectl apply`.

    Raises:
        ConfigError: the provider needs a setting that is not given.
    """
    check_spec(spec)
    if spec.provider == "kubernetes":
        names = {"name": spec.name, "namespace": spec.namespace, "ray": RAY, "python": spec.python.replace(".", "")}
        return to_yaml(_ray_cluster(spec), KUBERNETES_HEADER.format_map(names)) + "---\n" + to_yaml(_ray_job(spec))
    if spec.provider == "local":
        return to_yaml(_local(spec), LOCAL_HEADER)
    of = CLOUDS[spec.provider]
    return to_yaml(_cloud(spec, of), CLOUD_HEADER.format(provider=spec.provider, tools=of.tools, edit=of.edit))


@dataclass(frozen=True)
class Cloud:
    """What differs between cloud providers.

    Args:
        head, worker: default machine types.
        resources: CPUs and GPUs of the default worker.
        tools: packages that `ray up` needs on the user's machine.
        edit: comment lines on what to look at first.
        provider: gives the section `provider`.
        node: gives the `node_config` of a machine type, and of a spot machine where the last argument is true.
    """

    head: str
    worker: str
    resources: tuple[int, int]
    tools: str
    edit: str
    provider: Callable[[ClusterSpec], dict[str, Any]]
    node: Callable[[ClusterSpec, str, bool], dict[str, Any]]


def _aws_provider(spec: ClusterSpec) -> dict[str, Any]:
    return {
        "type": "aws",
        "region": spec.region or "us-west-2",
        **({"availability_zone": spec.zone} if spec.zone else {}),
        "# Machines that are not needed are terminated: a stopped one still pays for its disk.": None,
        "cache_stopped_nodes": False,
    }


def _aws_node(spec: ClusterSpec, machine: str, spot: bool) -> dict[str, Any]:
    disk = {"VolumeSize": spec.disk_gb, "VolumeType": "gp3"}
    return {
        "InstanceType": machine,
        **({"KeyName": PurePosixPath(spec.ssh_key).stem} if spec.ssh_key else {}),
        "ImageId": spec.image or AWS_IMAGE,
        "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": disk}],
        **({"InstanceMarketOptions": {"MarketType": "spot"}} if spot else {}),
    }


def _gcp_provider(spec: ClusterSpec) -> dict[str, Any]:
    region = spec.region or "us-central1"
    zone = spec.zone or f"{region}-a"
    return {"type": "gcp", "region": region, "availability_zone": zone, "project_id": spec.project_id}


def _gcp_node(spec: ClusterSpec, machine: str, spot: bool) -> dict[str, Any]:
    disk = {"diskSizeGb": spec.disk_gb, "sourceImage": spec.image or GCP_IMAGE}
    cheap = {"provisioningModel": "SPOT", "instanceTerminationAction": "DELETE"} if spot else {}
    return {
        "machineType": machine,
        "disks": [{"boot": True, "autoDelete": True, "type": "PERSISTENT", "initializeParams": disk}],
        "scheduling": {"onHostMaintenance": "TERMINATE", "automaticRestart": False, **cheap},
    }


def _azure_provider(spec: ClusterSpec) -> dict[str, Any]:
    where = {"location": spec.region or "westus2", "resource_group": spec.name}
    return {"type": "azure", **where, "availability_zone": spec.zone or "auto"}


def _azure_node(spec: ClusterSpec, machine: str, spot: bool) -> dict[str, Any]:
    publisher, offer, sku, version = (spec.image or AZURE_IMAGE).split(":")
    image = {"imagePublisher": publisher, "imageOffer": offer, "imageSku": sku, "imageVersion": version}
    cheap = {"priority": "Spot", "evictionPolicy": "Delete", "billingProfile": {"maxPrice": -1}} if spot else {}
    return {"azure_arm_parameters": {"vmSize": machine, **image, "osDiskSize": spec.disk_gb, **cheap}}


CLOUDS = {
    "aws": Cloud(
        *("m5.xlarge", "g5.xlarge", (4, 1), "boto3"),
        """\
#   region     and machine types; your quota for them, spot and on demand, is in the console under Service Quotas
#   ImageId    AWS's newest image with NVIDIA's driver. The head looks it up too, when it starts workers, and Ray's role for
#              the head may not. Allow it once per account, after the first `ray up`:
#                aws iam attach-role-policy --role-name ray-autoscaler-v1 \\
#                  --policy-arn arn:aws:iam::aws:policy/AmazonSSMReadOnlyAccess
#              or write the id itself here (ami-...): `aws ssm get-parameter --name` and what stands after resolve:ssm:
#   S3         Ray gives the head a role with access to S3, and workers none. For data or runs in S3 add to both workers'
#              node_config:  IamInstanceProfile: {Name: a profile of yours}   (the head's role then needs iam:PassRole)""",
        *(_aws_provider, _aws_node),
    ),
    "gcp": Cloud(
        *("e2-standard-4", "g2-standard-8", (8, 1), "google-api-python-client cryptography"),
        """\
#   availability_zone   one that has GPUs of this type; your quota is in the console under IAM & Admin, Quotas
#   sourceImage         Google's image with NVIDIA's driver; families end: `gcloud compute images list
#                       --project deeplearning-platform-release --no-standard-images` shows today's
#   storage             Ray gives the head a service account, and workers none. For data or runs in Google's storage add to
#                       both workers' node_config:
#                         serviceAccounts: [{email: one of yours, scopes: [https://www.googleapis.com/auth/cloud-platform]}]""",
        *(_gcp_provider, _gcp_node),
    ),
    "azure": Cloud(
        *("Standard_D4s_v5", "Standard_NC8as_T4_v3", (8, 1)),
        "azure-cli azure-identity azure-mgmt-{compute,network,resource} azure-common",
        """\
#   location, vmSize   your quota for them, spot and on demand, is in the portal under Quotas
#   resource_group     is made if it is not there
#   image              Ubuntu with NVIDIA's driver; `az vm image list --publisher microsoft-dsvm --all` shows today's""",
        *(_azure_provider, _azure_node),
    ),
}


def _cloud(spec: ClusterSpec, of: Cloud) -> dict[str, Any]:
    """A head on demand that stays, and workers with GPUs that come and go."""
    public = {"ssh_public_key": f"{spec.ssh_key}.pub"} if spec.provider == "azure" else {}
    key = {"ssh_private_key": spec.ssh_key, **public} if spec.ssh_key else {}
    return {
        "cluster_name": spec.name,
        "max_workers": spec.workers[1] + spec.on_demand,
        "idle_timeout_minutes": 5,
        "provider": of.provider(spec),
        "auth": {"ssh_user": spec.ssh_user or "ubuntu", **key},
        "head_node_type": "head",
        "available_node_types": _node_types(spec, of),
        "# The token, and what is needed to install raytrain. `ray up` reads all of it each time, so keep it small.": None,
        "file_mounts": {TOKEN_FILE: TOKEN_FILE, **commands.mounts(spec)},
        "rsync_exclude": ["**/__pycache__"],
        "# All nodes need the same versions of Python, Ray and torch. The cloud's SDK for the head is added by Ray.": None,
        "setup_commands": commands.install(spec),
        STARTING: None,
        "head_start_ray_commands": commands.start_head(spec),
        "worker_start_ray_commands": commands.start_worker(spec, PRELOAD),
    }


def _node_types(spec: ClusterSpec, of: Cloud) -> dict[str, Any]:
    (low, high), machine = spec.workers, spec.worker_machine or of.worker
    resources = _resources(spec, of)
    head = {
        "# Never trains, and never goes away: on demand, and Ray places nothing on its CPUs.": None,
        "resources": {"CPU": spec.head_cpus, "GPU": 0},
        "min_workers": 0,
        "max_workers": 0,
        "node_config": of.node(spec, spec.head_machine or of.head, False),
    }
    spot = {"resources": resources, "min_workers": low, "max_workers": high, "priority": 10}
    demand = {"resources": resources, "min_workers": 0, "max_workers": spec.on_demand, "priority": 0}
    return {
        "head": head,
        **({"spot": {**spot, "node_config": of.node(spec, machine, True)}} if high else {}),
        **({SECOND_CHOICE.format(spot=high): None} if high and spec.on_demand else {}),
        **({"on-demand": {**demand, "node_config": of.node(spec, machine, False)}} if spec.on_demand else {}),
    }


def _resources(spec: ClusterSpec, of: Cloud) -> dict[str, int]:
    is_default = spec.worker_machine in ("", of.worker)
    resources = {}
    for kind, field, default in zip(("CPU", "GPU"), ("worker_cpus", "worker_gpus"), of.resources, strict=True):
        given = getattr(spec, field)
        if given is None and not is_default:
            rule, fix = f"is required with --worker-machine {spec.worker_machine}", f"give its number of {kind}s"
            raise ConfigError(f"--{flag_name(field)}", "not given", rule, fix)
        resources[kind] = default if given is None else given
    return resources


def _local(spec: ClusterSpec) -> dict[str, Any]:
    """Own machines, reached by ssh, with autoscaler v1: in Ray 2.60 v2 starts one worker too few with this provider."""
    return {
        "cluster_name": spec.name,
        "provider": {"type": "local", "head_ip": spec.head_ip, "worker_ips": list(spec.worker_ips)},
        "auth": {"ssh_user": spec.ssh_user, "ssh_private_key": spec.ssh_key or "~/.ssh/id_ed25519"},
        "# The same token on all nodes.": None,
        "file_mounts": {TOKEN_FILE: TOKEN_FILE, **commands.mounts(spec)},
        "rsync_exclude": ["**/__pycache__"],
        "setup_commands": commands.install(spec),
        "# RAY_enable_autoscaler_v2=0: Ray 2.60's autoscaler v2 starts one worker too few with this provider. The older one"
        "\n# starts all of them, and Ray on a machine that comes back (10 s after it was last heard of).": None,
        "head_start_ray_commands": commands.start_head(spec, commands.V1, (f"--node-ip-address={spec.head_ip}",)),
        "worker_start_ray_commands": commands.start_worker(spec),
    }


def _ray_cluster(spec: ClusterSpec) -> dict[str, Any]:
    """The manifest of a RayCluster, for the KubeRay operator 1.5.1 or newer."""
    head = {"num-cpus": str(spec.head_cpus), "num-gpus": "0", **_store(spec)}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": spec.name, "namespace": spec.namespace},
        "spec": {
            "rayVersion": RAY,
            KUBERNETES_TOKEN.format(name=spec.name, namespace=spec.namespace): None,
            "authOptions": {"mode": "token"},
            "enableInTreeAutoscaling": True,
            "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": 300},
            "headGroupSpec": {
                "# num-cpus 0: Ray places nothing on the head, so it never trains.": None,
                "rayStartParams": head,
                "template": {"spec": {"containers": [_head_container(spec)], "restartPolicy": "Never"}},
            },
            "workerGroupSpecs": [_worker_group(spec)],
        },
    }


def _head_container(spec: ClusterSpec) -> dict[str, Any]:
    ports = {"gcs": 6379, "dashboard": 8265, "client": 10001}
    return {
        **_container("ray-head", spec, {**COMMON, **HEALTH}),
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "resources": _same({"cpu": "2", "memory": "8Gi"}),
    }


def _worker_group(spec: ClusterSpec) -> dict[str, Any]:
    (low, high), gpus = spec.workers, 1 if spec.worker_gpus is None else spec.worker_gpus
    gpu = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    container = {
        **_container("ray-worker", spec, {**COMMON, **RECONNECT, **(PRELOAD if gpus else {})}),
        "resources": _same({"cpu": str(spec.worker_cpus or 4), "memory": f"{spec.worker_memory_gib}Gi", **gpu}),
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


def _ray_job(spec: ClusterSpec) -> dict[str, Any]:
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


def _container(name: str, spec: ClusterSpec, environment: dict[str, str]) -> dict[str, Any]:
    variables = [{"name": key, "value": value} for key, value in environment.items() if key != "RAY_AUTH_MODE"]
    return {"name": name, "image": spec.image or "raytrain:latest", "env": variables}


def _same(amounts: dict[str, str]) -> dict[str, Any]:
    return {"requests": amounts, "limits": dict(amounts)}


def _store(spec: ClusterSpec) -> dict[str, str]:
    return {} if spec.object_store_memory is None else {"object-store-memory": str(spec.object_store_memory)}
