"""How does the driver connect to Ray, and does the cluster have what the run requires?

Without RAY_ADDRESS it starts an embedded Ray on this machine. Schedules nothing: that is done by the trainer. Runs in the
driver.
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
from raytrain.elastic.membership import shortage
from raytrain.errors import ResourceError
from raytrain.events.messages import count_of


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """A connection to Ray. An existing connection is used and stays open; a new one is closed at the end.

    Without RAY_ADDRESS the driver starts its own Ray, so two runs on one machine do not interfere.
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
    ray._private.worker.print_to_stdstream, original = _discard, ray._private.worker.print_to_stdstream
    try:
        yield
    finally:
        ray.shutdown()
        ray._private.worker.print_to_stdstream = original


def _discard(data: Any, ignore_prefix: bool) -> None:
    """Ray prints many lines to stdout for each lost worker, whatever its settings; the WorkerLost event replaces them."""


def is_somewhere() -> bool:
    """Whether the driver connects to a running Ray instead of starting one."""
    return bool(ray.is_initialized() or os.environ.get("RAY_ADDRESS"))


def choose_accelerator(setting: str) -> str:
    """ "cpu" or "gpu"; `auto` chooses GPUs if the cluster has any."""
    if setting != "auto":
        return setting
    return "gpu" if ray.cluster_resources().get("GPU", 0) else "cpu"


def worker_resources(config: RunConfig, accelerator: str) -> dict[str, float]:
    """The resources that Ray reserves for one worker."""
    resources = {"CPU": config.cpus_per_worker}
    return resources | {"GPU": 1.0} if accelerator == "gpu" else resources


def check_room(config: RunConfig, resources: dict[str, float]) -> None:
    """Checks that an embedded Ray, which never grows, has room for `min_workers`. A cluster may still grow.

    Raises:
        ResourceError: this machine has too few resources.
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
    """Whether this process started the Ray that it uses, so that no node can join."""
    node = ray._private.worker._global_node
    return node is not None and node.is_head() and len(ray.nodes()) == 1


def pinned(actor_class: type, **options: Any) -> Any:
    """A Ray actor class with 0 CPUs, pinned to the driver's node, so that the loss of another node does not affect it."""
    here = {ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
    remote = ray.remote(num_cpus=0, label_selector=here, **options)(actor_class)
    return remote.options(scheduling_strategy="DEFAULT")  # not in the placement group of the caller
