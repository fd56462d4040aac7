"""What do AWS, Google Cloud and Azure call the same things? Their sections `provider` and `node_config`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from raytrain.cluster.file.spec import ClusterSpec

SSM = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
"""Where AWS publishes, for each region, the id of its newest image with Ubuntu 22.04 and NVIDIA's driver."""


@dataclass(frozen=True)
class Cloud:
    """A provider of machines by the hour.

    Args:
        head, worker: its machine types where none is asked for: CPUs only, and one GPU.
        region, zone, image: where none is asked for.
        tools: packages that `ray up` needs on your machine.
        edit: comment lines on what to look at first.
        provider: the section of that name.
        node: the `node_config` of a machine type, spot or on demand.
    """

    head: str
    worker: str
    region: str
    zone: str
    image: str
    tools: str
    edit: str
    provider: Callable[[ClusterSpec], dict[str, Any]]
    node: Callable[[ClusterSpec, str, bool], dict[str, Any]]


def _aws_provider(spec: ClusterSpec) -> dict[str, Any]:
    return {
        "type": "aws",
        "region": spec.region or AWS.region,
        **({"availability_zone": spec.zone} if spec.zone else {}),
        "# Machines that are not needed are terminated: a stopped one still pays for its disk.": None,
        "cache_stopped_nodes": False,
    }


def _aws_node(spec: ClusterSpec, machine: str, spot: bool) -> dict[str, Any]:
    disk = {"VolumeSize": spec.disk_gb, "VolumeType": "gp3"}
    return {
        "InstanceType": machine,
        **({"KeyName": PurePosixPath(spec.ssh_key).stem} if spec.ssh_key else {}),
        "ImageId": spec.image or AWS.image,
        "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": disk}],
        **({"InstanceMarketOptions": {"MarketType": "spot"}} if spot else {}),
    }


AWS = Cloud(
    *("m5.xlarge", "g5.xlarge", "us-west-2", "", f"resolve:ssm:{SSM}", "boto3"),
    edit="""\
#   region     and machine types; your quota for them, spot and on demand, is in the console under Service Quotas
#   ImageId    AWS's newest image with NVIDIA's driver. The head looks it up too, when it starts workers, and Ray's role for
#              the head may not. Allow it once per account, after the first `ray up`:
#                aws iam attach-role-policy --role-name ray-autoscaler-v1 \\
#                  --policy-arn arn:aws:iam::aws:policy/AmazonSSMReadOnlyAccess
#              or write the id itself here (ami-...): `aws ssm get-parameter --name` and what stands after resolve:ssm:
#   S3         Ray gives the head a role with access to S3, and workers none. For data or runs in S3 add to both workers'
#              node_config:  IamInstanceProfile: {Name: a profile of yours}   (the head's role then needs iam:PassRole)""",
    provider=_aws_provider,
    node=_aws_node,
)


def _gcp_provider(spec: ClusterSpec) -> dict[str, Any]:
    zone = spec.zone or (f"{spec.region}-a" if spec.region else GCP.zone)
    return {"type": "gcp", "region": spec.region or GCP.region, "availability_zone": zone, "project_id": spec.project_id}


def _gcp_node(spec: ClusterSpec, machine: str, spot: bool) -> dict[str, Any]:
    disk = {"diskSizeGb": spec.disk_gb, "sourceImage": spec.image or GCP.image}
    cheap = {"provisioningModel": "SPOT", "instanceTerminationAction": "DELETE"} if spot else {}
    return {
        "machineType": machine,
        "disks": [{"boot": True, "autoDelete": True, "type": "PERSISTENT", "initializeParams": disk}],
        "scheduling": {"onHostMaintenance": "TERMINATE", "automaticRestart": False, **cheap},
    }


GCP = Cloud(
    *("e2-standard-4", "g2-standard-8", "us-central1", "us-central1-a"),
    "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2404-nvidia-580",
    "google-api-python-client cryptography",
    edit="""\
#   availability_zone   one that has GPUs of this type; your quota is in the console under IAM & Admin, Quotas
#   sourceImage         Google's image with NVIDIA's driver; families end: `gcloud compute images list
#                       --project deeplearning-platform-release --no-standard-images` shows today's
#   storage             Ray gives the head a service account, and workers none. For data or runs in Google's storage add to
#                       both workers' node_config:
#                         serviceAccounts: [{email: one of yours, scopes: [https://www.googleapis.com/auth/cloud-platform]}]""",
    provider=_gcp_provider,
    node=_gcp_node,
)


def _azure_provider(spec: ClusterSpec) -> dict[str, Any]:
    zone = spec.zone or AZURE.zone
    location = spec.region or AZURE.region
    return {"type": "azure", "location": location, "resource_group": spec.name, "availability_zone": zone}


def _azure_node(spec: ClusterSpec, machine: str, spot: bool) -> dict[str, Any]:
    publisher, offer, sku, version = (spec.image or AZURE.image).split(":")
    image = {"imagePublisher": publisher, "imageOffer": offer, "imageSku": sku, "imageVersion": version}
    cheap = {"priority": "Spot", "evictionPolicy": "Delete", "billingProfile": {"maxPrice": -1}} if spot else {}
    return {"azure_arm_parameters": {"vmSize": machine, **image, "osDiskSize": spec.disk_gb, **cheap}}


AZURE = Cloud(
    *("Standard_D4s_v5", "Standard_NC8as_T4_v3", "westus2", "auto", "microsoft-dsvm:ubuntu-hpc:2204:latest"),
    "azure-cli azure-identity azure-mgmt-{compute,network,resource} azure-common",
    edit="""\
#   location, vmSize   your quota for them, spot and on demand, is in the portal under Quotas
#   resource_group     is made if it is not there
#   image              Ubuntu with NVIDIA's driver; `az vm image list --publisher microsoft-dsvm --all` shows today's""",
    provider=_azure_provider,
    node=_azure_node,
)

CLOUDS: dict[str, Cloud] = {"aws": AWS, "gcp": GCP, "azure": AZURE}
