"""How does the driver connect to Ray, and does the cluster have what the run requires?

Without RAY_ADDRESS it starts an embedded Ray on this machine. Schedules nothing: that is done by the trainer. Runs in the
driver.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray._private.services
import ray._private.utils
import ray._private.worker
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray.exceptions import RayError, RpcError

from raytrain.config import RunConfig
from raytrain.elastic.environment import forwarded
from raytrain.elastic.fork_server import runtime_environment, started_server
from raytrain.elastic.membership import shortage
from raytrain.errors import ConfigError, ResourceError
from raytrain.events.messages import count_of

ASK_AGAIN_S = 0.5


@contextlib.contextmanager
def connected(timeout_s: float = 60.0, runtime_env: Mapping[str, Any] | None = None) -> Iterator[None]:
    """A connection to Ray. An existing connection is used and stays open; a new one is closed at the end.

    Without RAY_ADDRESS the driver starts its own Ray, so two runs on one machine do not interfere.

    Args:
        timeout_s: how long the Ray at RAY_ADDRESS may take to answer.
        runtime_env: of all processes of this driver, where the connection is a new one.

    Raises:
        ConfigError: RAY_ADDRESS is not the address of a Ray that drivers can use.
        ResourceError: Ray does not answer there, or cannot be started on this machine.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = os.environ.get("RAY_ADDRESS") or "local"
    settings: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
    if runtime_env:
        settings["runtime_env"] = dict(runtime_env)
    if address == "local":
        settings["include_dashboard"] = False
        _give_token()
    else:
        check_answers(address, timeout_s)
    with started_server() if address == "local" else contextlib.nullcontext():
        try:
            with _apart():
                ray.init(**settings)
        except (OSError, RayError, RuntimeError, ValueError) as error:
            ray.shutdown()
            raise _not_connected(address, error) from error
        ray._private.worker.print_to_stdstream, original = _discard, ray._private.worker.print_to_stdstream
        try:
            yield
        finally:
            ray.shutdown()
            ray._private.worker.print_to_stdstream = original


def forked(config: RunConfig) -> dict[str, str]:
    """The runtime environment in which all processes of this driver are forked; empty where they are not."""
    of_job = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR) or "{}").get("runtime_env") or {}
    variables = forwarded(os.environ, config.forward_env)
    return runtime_environment(of_job, variables, num_cpus=1.0) if config.fork_workers else {}


def _give_token() -> None:
    """Sets the password of a Ray that starts here where Ray could not write a new one to the home directory."""
    if any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return
    try:
        home = Path.home() / ".ray"
        home.mkdir(parents=True, exist_ok=True)
        is_usable = (home / "auth_token").exists() or os.access(home, os.W_OK)
    except (OSError, RuntimeError):
        is_usable = False
    if not is_usable:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """In this block Ray leaves the driver's signal handlers alone, and starts each of its processes in a session of its own.

    A signal to the driver's process group, as `timeout` or a closing terminal send it, would end Ray's processes while the
    driver still needs them to save. They end with the driver where the kernel can see to that.
    """
    services, utils = ray._private.services, ray._private.utils
    popen, set_handler = services.ConsolePopen, utils.set_sigterm_handler
    if utils.detect_fate_sharing_support():
        services.ConsolePopen = partial(popen, start_new_session=True)
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        services.ConsolePopen, utils.set_sigterm_handler = popen, set_handler


def check_answers(address: str, timeout_s: float) -> None:
    """Waits until a Ray answers at `address`, which `ray.init` would do for more than a minute.

    Raises:
        ConfigError: the address is of another kind.
        ResourceError: none answers within `timeout_s`.
    """
    if "://" in address:
        rule = (
            "is HOST:PORT of the head, as for ray start --address, or auto, since the driver runs on a node of the cluster"
        )
        fix = "leave it out to train on this machine, or submit the job to the cluster's dashboard: raytrain submit"
        raise ConfigError("RAY_ADDRESS", address, rule, fix)
    host, _, port = address.rpartition(":")
    if not port.isdigit():  # auto
        return
    deadline, found = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host.strip("[]"), int(port)), max(0.1, deadline - time.monotonic())).close()
            break
        except (OSError, OverflowError) as error:
            found = str(error)
        time.sleep(min(ASK_AGAIN_S, max(0.0, deadline - time.monotonic())))
    else:
        raise _no_answer(address, timeout_s, found)
    has_answered = threading.Event()
    threading.Thread(target=_ask, args=(address, deadline, has_answered), daemon=True).start()
    if not has_answered.wait(max(1.0, deadline - time.monotonic())):
        raise _no_answer(address, timeout_s, "what listens there does not speak as Ray's head does")


def _ask(address: str, deadline: float, has_answered: threading.Event) -> None:
    """Waits until the head at `address` answers, or refuses, as `ray.init` will say; `deadline` in monotonic seconds."""
    while time.monotonic() < deadline:
        try:
            ray._raylet.GcsClient(address=address)
        except RpcError:
            continue
        except (RayError, RuntimeError, ValueError):
            pass
        has_answered.set()
        return


def _no_answer(address: str, timeout_s: float, found: str) -> ResourceError:
    return ResourceError(
        "RAY_ADDRESS",
        f"{address}: {found}",
        f"a head of Ray answers there within run.start_timeout_s = {timeout_s:g}",
        "see ray status on that machine; leave RAY_ADDRESS out to train on this one",
    )


def _not_connected(address: str, error: Exception) -> ResourceError:
    """The error for a failed `ray.init`."""
    if address != "local":
        return ResourceError(
            "RAY_ADDRESS", f"{address}: {error}", "can be connected to from here", "correct the cause above"
        )
    directory = ray._common.utils.get_default_system_temp_dir()
    name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "RAY_TMPDIR")
    if "AF_UNIX" in str(error):
        rule = "is short enough for the paths of Ray's sockets below it, which may have 107 bytes"
        return ResourceError(name, directory, rule, "set RAY_TMPDIR to a shorter path, for example /tmp")
    return ResourceError(
        "Ray on this machine", error, f"starts, with its files in {directory}", "correct the cause above, or set RAY_TMPDIR"
    )


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
