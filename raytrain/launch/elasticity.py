"""Which elasticity does this run use, in place or restart, and which trainer implements it? Runs in the driver.

In-place elasticity uses internals of Ray Train, so it is imported only once it is chosen: with another Ray that would fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import ray
from ray.train import RunConfig as RayRunConfig
from ray.train import ScalingConfig

from raytrain.config import RunConfig
from raytrain.elastic.attempt import AttemptFactory, AttemptRendezvous, FitActor
from raytrain.elastic.contract import CHECKED_ON, violations
from raytrain.elastic.controller_config import CONTROLLER_CONFIG, ControllerConfig
from raytrain.elastic.fork_server import runtime_environment
from raytrain.elastic.placement import ResourceLease
from raytrain.elastic.restart import RestartTrainer, StopRelay
from raytrain.errors import ConfigError
from raytrain.launch import cluster
from raytrain.launch.monitor import Viewer
from raytrain.rendezvous.actor import RendezvousActor
from raytrain.rendezvous.health import HealthTimeouts
from raytrain.task import pickle_by_value
from raytrain.worker.context import RunSpec
from raytrain.worker.entry import CONNECTIONS, Connections, run_worker

MAX_CALLS = 100_000
"""Concurrent calls of the rendezvous: each worker waits in one, and sends heartbeats in another."""
MAX_FITS = 16
"""Attempts whose `TorchTrainer.fit` has not returned yet."""


class RayTrainer(Protocol):
    """Runs the workers."""

    def fit(self) -> object:
        """Returns when the run is complete or stopped."""

    def close(self, timeout_s: float) -> None:
        """Waits, up to the timeout, until no thread of it uses Ray any more."""


def is_in_place(config: RunConfig, viewer: Viewer) -> bool:
    """Whether the run changes its workers in place. Warns once if `auto` cannot.

    Args:
        config: of the run.
        viewer: shows the warning.

    Raises:
        ConfigError: it must be in place, or has spares, and the installed Ray does not support it.
    """
    in_place = config.elasticity != "restart" and _is_supported(config.elasticity, viewer)
    if config.spares and not in_place:
        rule = "restart mode has no spares: all workers restart when one is lost"
        raise ConfigError("run.spares", config.spares, rule, "leave run.spares and run.elasticity out")
    return in_place


def _is_supported(setting: str, viewer: Viewer) -> bool:
    broken = violations()
    if not broken:
        return True
    found = broken[0] + (f", and {len(broken) - 1} more" if len(broken) > 1 else "")
    if setting == "in_place":
        raise ConfigError(
            "run.elasticity",
            f"in_place, with Ray {ray.__version__}: {found}",
            f"in_place uses internals of Ray Train {CHECKED_ON}",
            f"set run.elasticity to restart or auto, or install Ray {CHECKED_ON}",
        )
    viewer.status(
        f"warning: each change of workers restarts all of them from the newest checkpoint, since in-place elasticity "
        f"does not know Ray {ray.__version__} ({found})",
        time.time(),
    )
    return False


def open_rendezvous(config: RunConfig, in_place: bool) -> Any:
    """The rendezvous of the run; in restart mode each attempt has its own, and a relay passes stop requests on to it."""
    if not in_place:
        return StopRelay()
    return _actor(RendezvousActor, config.min_workers, _timeouts(config), None, config.max_workers)


def build_trainer(
    spec: RunSpec,
    writer: Any,
    rendezvous: Any,
    in_place: bool,
    scratch: str,
    is_complete: Callable[[], bool],
    while_running: Callable[[], None],
    lease: ResourceLease | None = None,
) -> RayTrainer:
    """The trainer of a run.

    Args:
        spec: what is trained, and how.
        writer: handle of the event writer.
        rendezvous: of `open_rendezvous`.
        in_place: of `is_in_place`.
        scratch: a directory for Ray Train, which insists on one.
        is_complete: whether the newest checkpoint is that of the last step.
        while_running: called several times a second while the run goes on; may raise to end it.
        lease: the run's resources in a cluster that it shares with others; in place only.
    """
    pickle_by_value(spec.task)
    config, spec_ref = spec.config, ray.put(spec)
    controller_config = _controller_config(config, rendezvous, writer, lease)
    resources, use_gpu = cluster.worker_resources(config, spec.accelerator), spec.accelerator == "gpu"
    of_job = ray.get_runtime_context().runtime_env
    environment = runtime_environment(of_job, spec.environment, config.cpus_per_worker) if config.fork_workers else {}
    run_config = RayRunConfig(name=config.name, storage_path=scratch, worker_runtime_env=environment)
    if not in_place:
        factory = AttemptFactory(
            train=run_worker,
            connect=lambda actor, first: {CONNECTIONS: Connections(spec_ref, actor, writer, first)},
            open_rendezvous=lambda num, step, last: _actor(AttemptRendezvous, num, _timeouts(config), step, last),
            fit=cluster.pinned(FitActor, max_restarts=-1, max_concurrency=MAX_FITS).remote(),
            resources=resources,
            use_gpu=use_gpu,
            run_config=run_config,
        )
        return RestartTrainer(factory, controller_config, is_complete, while_running)
    from raytrain.elastic.trainer import ElasticTrainer

    return ElasticTrainer(
        run_worker,
        train_loop_config={CONNECTIONS: Connections(spec_ref, rendezvous, writer), CONTROLLER_CONFIG: controller_config},
        scaling_config=ScalingConfig(num_workers=config.max_workers, use_gpu=use_gpu, resources_per_worker=resources),
        run_config=run_config,
        while_running=while_running,
    )


def _controller_config(config: RunConfig, rendezvous: Any, writer: Any, lease: ResourceLease | None) -> ControllerConfig:
    return ControllerConfig(
        config.min_workers,
        config.max_workers,
        config.max_failures,
        config.start_timeout_s,
        config.wait_timeout_s,
        config.slow_timeout_s,
        config.num_logical,
        rendezvous,
        writer,
        lease,
        config.spares,
    )


def _timeouts(config: RunConfig) -> HealthTimeouts:
    return HealthTimeouts(
        config.heartbeat_timeout_s, config.hang_timeout_s, config.slow_timeout_s, config.collective_timeout_s
    )


def _actor(kind: type, *arguments: Any) -> Any:
    return cluster.pinned(kind, max_restarts=-1, max_concurrency=MAX_CALLS).remote(*arguments)
