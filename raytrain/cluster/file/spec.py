"""What does a person say about the cluster that they want? One frozen object; its fields are the flags of `render`.

What a provider needs besides (a default machine, an image) is in `machines` and with the provider. Looks at nothing.
"""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from raytrain.config import WorkerRange
from raytrain.errors import ConfigError

Provider = Literal["aws", "gcp", "azure", "local", "kubernetes"]
PROVIDERS: tuple[str, ...] = get_args(Provider)


def flag_name(field: str) -> str:
    """'object_store_bytes' -> 'object-store-bytes', as on the command line."""
    return field.replace("_", "-")


class ClusterSpec(BaseModel):
    """A cluster for elastic training: a head that never trains, and workers that come and go."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, alias_generator=flag_name, populate_by_name=True
    )

    provider: Provider
    """Where the machines are; local: own ones, reached by ssh."""
    name: str = "raytrain"
    """Name of the cluster."""
    workers: WorkerRange = (0, 8)
    """Worker nodes, min:max; with spot machines these are spot. (local: all of worker-ips.)"""
    on_demand: int = Field(2, ge=0)
    """Most on-demand worker nodes besides, as second choice; 0 for none. (aws, gcp, azure)"""
    head_machine: str = ""
    """Machine type of the head. (aws, gcp, azure)"""
    worker_machine: str = ""
    """Machine type of a worker. (aws, gcp, azure)"""
    head_cpus: int = Field(0, ge=0)
    """CPUs of the head that Ray may use; 0 keeps training away from it."""
    worker_cpus: int | None = Field(None, gt=0)
    """CPUs of a worker. Required with --worker-machine; local: what Ray finds."""
    worker_gpus: int | None = Field(None, ge=0)
    """GPUs of a worker. Required with --worker-machine; local: what Ray finds; kubernetes: 1."""
    worker_memory_gib: int = Field(32, gt=0)
    """Memory of a worker's pod, in GiB. (kubernetes)"""
    object_store_memory: int | None = Field(None, gt=0)
    """Size of each node's object store, in bytes. Default: Ray's, 30 % of the memory; kubernetes: 30 % of the pod's."""
    disk_gb: int = Field(200, gt=0)
    """Disk of each node, in GB. (aws, gcp, azure)"""
    region: str = ""
    """Region, or Azure's location. (aws, gcp, azure)"""
    zone: str = ""
    """Availability zone, or several with commas between them. (aws, gcp, azure)"""
    project_id: str = ""
    """Project that pays. (gcp)"""
    image: str = ""
    """Image of workers: an AMI, an image's path, publisher:offer:sku:version, or a container image with raytrain in it."""
    namespace: str = "default"
    """Namespace. (kubernetes)"""
    head_ip: str = ""
    """Address of the head. (local)"""
    worker_ips: tuple[str, ...] = ()
    """Addresses of the workers, with commas between them. (local)"""
    ssh_user: str = ""
    """User on the machines. Default: ubuntu; local: no default."""
    ssh_key: str = ""
    """Private key for ssh. Default: one that Ray makes; local: ~/.ssh/id_ed25519."""
    python: str = "3.11"
    """Version of Python that the setup installs."""
    setup: Literal["venv", "none"] = "venv"
    """venv: nodes get Python, this project and its dependencies in ~/venv; none: they have them already."""
    project: str = "."
    """Directory of raytrain's sources, copied to the nodes and installed there; with setup venv."""
    activate: str = ""
    """Shell command that makes `ray` available, if it is not on the PATH, for example: source ~/env/bin/activate"""


def check_spec(spec: ClusterSpec) -> None:
    """What a provider cannot do without is given.

    Raises:
        ConfigError: it is not.
    """
    low, high = spec.workers
    if not 0 <= low <= high or (high == 0 and not spec.on_demand):
        raise ConfigError("--workers", f"{low}:{high}", "is min:max, with a max of at least 1", "write it like 0:8")
    for field, fix in _NEEDED.get(spec.provider, ()):
        if not getattr(spec, field):
            raise ConfigError(f"--{flag_name(field)}", "not given", f"is needed for --provider {spec.provider}", fix)
    if spec.provider == "azure" and spec.image and spec.image.count(":") != 3:
        rule, fix = "is publisher:offer:sku:version", "see `az vm image list`"
        raise ConfigError("--image", spec.image, rule, fix)
    if spec.provider == "local" and spec.head_ip in spec.worker_ips:
        raise ConfigError("--worker-ips", spec.head_ip, "the head is no worker", "leave it out of --worker-ips")


_NEEDED = {
    "local": (
        ("head_ip", "give the head's address, for example 10.0.0.1"),
        ("worker_ips", "give the workers' addresses, for example 10.0.0.2,10.0.0.3"),
        ("ssh_user", "give the user that ssh logs in as"),
    ),
    "gcp": (("project_id", "give the id of your project, as `gcloud projects list` shows it"),),
}
"""By provider: fields that have no default that could be right, and what to do."""
