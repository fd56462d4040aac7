"""The driver's connection to Ray: an embedded one on a laptop, the cluster's where RAY_ADDRESS says so.

Also what the cluster has, as far as a run must know it before it starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import ray
import ray._private.worker

from raytrain.config import RunConfig
from raytrain.elastic.capacity import shortage
from raytrain.errors import ResourceError
from raytrain.events.words import count_of


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """A connection to Ray. One that is there already is used and stays; otherwise one is made, and closed at the end.

    Without RAY_ADDRESS the Ray is embedded and belongs to this driver alone, so two runs on a machine do not clash.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = os.environ.get("RAY_ADDRESS") or "local"
    settings: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        settings["include_dashboard"] = False
    ray.init(**settings)
    ray._private.worker.print_to_stdstream, loud = _say_nothing, ray._private.worker.print_to_stdstream
    try:
        yield
    finally:
        ray.shutdown()
        ray._private.worker.print_to_stdstream = loud


def _say_nothing(data: Any, ignore_prefix: bool) -> None:
    """Ray prints many lines on stdout for each lost worker, whatever its settings; our event tells it in one."""


def is_somewhere() -> bool:
    """Whether there is a Ray to connect to, or to use, rather than to start."""
    return bool(ray.is_initialized() or os.environ.get("RAY_ADDRESS"))


def choose_accelerator(setting: str) -> str:
    """ "cpu" or "gpu": `auto` takes GPUs where the cluster has any."""
    if setting != "auto":
        return setting
    return "gpu" if ray.cluster_resources().get("GPU", 0) else "cpu"


def worker_resources(config: RunConfig, accelerator: str) -> dict[str, float]:
    """What Ray reserves for one worker."""
    resources = {"CPU": config.cpus_per_worker}
    return resources | {"GPU": 1.0} if accelerator == "gpu" else resources


def check_room(config: RunConfig, resources: dict[str, float]) -> None:
    """An embedded Ray never grows: what it lacks is said at once.

    Raises:
        ResourceError: the smallest number of workers does not fit into this machine.
    """
    total = ray.cluster_resources()
    fits = all(amount * config.min_workers <= total.get(name, 0.0) for name, amount in resources.items())
    if fits or not _is_embedded():
        return
    raise ResourceError(
        "run.workers",
        f"at least {count_of(config.min_workers, 'worker')}",
        shortage(resources, config.min_workers, total),
        "lower run.workers or run.cpus_per_worker, or set RAY_ADDRESS to the address of a cluster",
    )


def _is_embedded() -> bool:
    """Whether this process has started the Ray that it uses, so that no node will ever join."""
    node = ray._private.worker._global_node
    return node is not None and node.is_head() and len(ray.nodes()) == 1


def pinned(actor_class: type, **options: Any) -> Any:
    """An actor class without CPUs whose actors live on the driver's node, so that no other node takes them along."""
    here = {ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
    remote = ray.remote(num_cpus=0, label_selector=here, **options)(actor_class)
    return remote.options(scheduling_strategy="DEFAULT")  # and not in the placement group of whoever makes it
