"""What goes wrong with one cloud alone? Names and settings that nobody looks at before the cloud itself does."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raytrain.cluster.file.checks.form import unknown
from raytrain.cluster.file.document import Document, Mistake

RUN_INSTANCES = frozenset(
    re.findall(
        r"\w+",
        """AdditionalInfo BlockDeviceMappings CapacityReservationSpecification ClientToken CpuOptions
        CreditSpecification DisableApiStop DisableApiTermination DryRun EbsOptimized ElasticGpuSpecification
        ElasticInferenceAccelerators EnablePrimaryIpv6 EnclaveOptions HibernationOptions IamInstanceProfile
        ImageId InstanceInitiatedShutdownBehavior InstanceMarketOptions InstanceType Ipv6AddressCount
        Ipv6Addresses KernelId KeyName LaunchTemplate LicenseSpecifications MaintenanceOptions MaxCount
        MetadataOptions MinCount Monitoring NetworkInterfaces NetworkPerformanceOptions Operator Placement
        PrivateDnsNameOptions PrivateIpAddress RamdiskId SecurityGroupIds SecurityGroups SubnetId
        TagSpecifications UserData""",
    )
)
"""Parameters of EC2's RunInstances (Amazon EC2 API Reference, 2016-11-15), which gets `node_config` as it is."""

RAYS_OWN = frozenset({"SubnetIds"})
"""What Ray reads from `node_config` itself."""


def aws_names(document: Document) -> Iterator[Mistake]:
    """Each key of a node_config is one that EC2 knows; Ray passes it on, and EC2 refuses the whole machine."""
    for name in document.mapping("available_node_types") if document.provider == "aws" else ():
        place = ("available_node_types", name, "node_config")
        for key in document.mapping(*place):
            if key not in RUN_INSTANCES | RAYS_OWN:
                yield unknown(
                    document, (*place, str(key)), sorted(RUN_INSTANCES | RAYS_OWN), "is a parameter of EC2's RunInstances"
                )


def aws_image(document: Document) -> Iterator[Mistake]:
    """The image is named: the one that Ray takes is Ubuntu 18.04, whose C library is too old for today's torch."""
    for name in document.mapping("available_node_types") if document.provider == "aws" else ():
        config = document.mapping("available_node_types", name, "node_config")
        if not config.get("ImageId") and not config.get("LaunchTemplate"):
            rule = "without it Ray takes an image with Ubuntu 18.04 (glibc 2.27), where torch 2.6 and newer do not install"
            fix = "name one with NVIDIA's driver, as raytrain cluster render --provider aws does"
            yield document.mistake(("available_node_types", name, "node_config", "ImageId"), None, rule, fix)


def aws_key(document: Document) -> Iterator[Mistake]:
    """A key of one's own has a name at EC2, too."""
    if document.provider == "aws" and document.get("auth", "ssh_private_key"):
        for name in document.mapping("available_node_types"):
            place = ("available_node_types", name, "node_config", "KeyName")
            if not document.get(*place):
                fix = "add KeyName: the key pair's name at EC2, or remove ssh_private_key: Ray makes a pair"
                yield document.mistake(place, None, "is needed with auth.ssh_private_key", fix)


def gcp_project(document: Document) -> Iterator[Mistake]:
    """Google Cloud wants to know who pays."""
    if document.provider == "gcp" and not document.get("provider", "project_id"):
        place, fix = ("provider", "project_id"), "add the id that `gcloud projects list` shows"
        yield document.mistake(place, None, "is needed with type: gcp", fix)


def azure_keys(document: Document) -> Iterator[Mistake]:
    """On Azure both halves of a key are given, or none: then Ray makes them."""
    if document.provider == "azure":
        names = ("ssh_private_key", "ssh_public_key")
        missing = [name for name in names if not document.get("auth", name)]
        if len(missing) == 1:
            fix = f"add {missing[0]}, or remove the other: Ray makes both"
            yield document.mistake(("auth", missing[0]), None, "on Azure both keys are given, or none", fix)
