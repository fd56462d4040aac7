"""The cluster file for machines by the hour: a head that stays, and workers with GPUs that come and go. Pure."""

from __future__ import annotations

from typing import Any

from raytrain.cluster.file.clouds import CLOUDS, Cloud
from raytrain.cluster.file.commands import PRELOAD, TOKEN_FILE, start_head, start_worker
from raytrain.cluster.file.machines import BY_PROVIDER
from raytrain.cluster.file.setup import mounts, setup_commands
from raytrain.cluster.file.spec import ClusterSpec, flag_name
from raytrain.errors import ConfigError

HEADER = """\
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
# the head's localhost. Every message needs the token of ~/.ray/auth_token, which goes to all nodes."""

SECOND_CHOICE = """\
# Second choice: the same machine on demand. Ray's autoscaler starts, of the types that fit equally well, the one with
# the higher priority that is below its max_workers. Ray 2.60 does not turn to the next type when the cloud refuses a
# machine: it asks for the same type again. So these come when all {spot} spot machines are there; while no more of those
# are to be had, lower their max_workers to the number that there are and run `ray up -y --no-restart FILE`."""

STARTING = """\
# Variables that are set before `ray start` reach all processes of that node. RAY_health_check_*: a dead node is noticed
# within seconds, not a minute. RAY_preload_python_modules: worker processes import it before they are asked for."""


def cloud(spec: ClusterSpec) -> dict[str, Any]:
    """The file's content, in its order; keys that begin with '# ' are comments.

    Raises:
        ConfigError: a machine type is not known here, and not described.
    """
    of = CLOUDS[spec.provider]
    return {
        HEADER.format(provider=spec.provider, tools=of.tools, edit=of.edit): None,
        "cluster_name": spec.name,
        "max_workers": spec.workers[1] + spec.on_demand,
        "idle_timeout_minutes": 5,
        "provider": of.provider(spec),
        "auth": _auth(spec),
        "head_node_type": "head",
        "available_node_types": _types(spec, of),
        "# The token, and what is needed to install raytrain. `ray up` reads all of it each time, so keep it small.": None,
        "file_mounts": {TOKEN_FILE: TOKEN_FILE, **mounts(spec)},
        "rsync_exclude": ["**/__pycache__"],
        "# All nodes need the same versions of Python, Ray and torch. The cloud's SDK for the head is added by Ray.": None,
        "setup_commands": setup_commands(spec),
        STARTING: None,
        "head_start_ray_commands": start_head(spec),
        "worker_start_ray_commands": start_worker(spec, PRELOAD),
    }


def _auth(spec: ClusterSpec) -> dict[str, Any]:
    user = {"ssh_user": spec.ssh_user or "ubuntu"}
    if not spec.ssh_key:
        return user
    public = {"ssh_public_key": f"{spec.ssh_key}.pub"} if spec.provider == "azure" else {}
    return {**user, "ssh_private_key": spec.ssh_key, **public}


def _types(spec: ClusterSpec, of: Cloud) -> dict[str, Any]:
    (low, high), machine = spec.workers, spec.worker_machine or of.worker
    has = _resources(spec, machine)
    head = {
        "# Never trains, and never goes away: on demand, and Ray places nothing on its CPUs.": None,
        "resources": {"CPU": spec.head_cpus, "GPU": 0},
        "min_workers": 0,
        "max_workers": 0,
        "node_config": of.node(spec, spec.head_machine or of.head, False),
    }
    spot = {"resources": has, "min_workers": low, "max_workers": high, "priority": 10}
    demand = {"resources": has, "min_workers": 0, "max_workers": spec.on_demand, "priority": 0}
    return {
        "head": head,
        **({"spot": {**spot, "node_config": of.node(spec, machine, True)}} if high else {}),
        **({SECOND_CHOICE.format(spot=high): None} if high and spec.on_demand else {}),
        **({"on-demand": {**demand, "node_config": of.node(spec, machine, False)}} if spec.on_demand else {}),
    }


def _resources(spec: ClusterSpec, machine: str) -> dict[str, int]:
    cpus, gpus = BY_PROVIDER[spec.provider].get(machine, (None, None))
    has = {
        "CPU": cpus if spec.worker_cpus is None else spec.worker_cpus,
        "GPU": gpus if spec.worker_gpus is None else spec.worker_gpus,
    }
    for (resource, number), field in zip(has.items(), ("worker_cpus", "worker_gpus"), strict=True):
        if number is None:
            rule = f"is needed, since the number of {resource}s of {machine} is not known here"
            raise ConfigError(f"--{flag_name(field)}", "not given", rule, "give the number that the machine has")
    return {resource: number for resource, number in has.items() if number is not None}
