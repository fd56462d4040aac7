"""How do workers come and go in this run: in place, or by restarts? And the trainer that does it. Runs in the driver.

In place stands on the inside of Ray Train, so it is imported only once it is chosen: with another Ray that would fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import ray
from ray.train import RunConfig as RayRunConfig
from ray.train import ScalingConfig

from raytrain.config import RunConfig
from raytrain.elastic.attempt_rendezvous import AttemptRendezvous
from raytrain.elastic.contract import CHECKED_ON, violations
from raytrain.elastic.places import Share
from raytrain.elastic.plain_ray import Means
from raytrain.elastic.restarting import RestartingTrainer, StopRelay
from raytrain.elastic.wiring import WIRING, Wiring
from raytrain.errors import ConfigError
from raytrain.launch import cluster
from raytrain.launch.watch import Viewer
from raytrain.rendezvous.actor import RendezvousActor
from raytrain.rendezvous.vitals import Limits
from raytrain.worker.entry import CONNECTIONS, Connections, Work, run_worker

MOST_CALLS = 100_000
"""At once, in the rendezvous: each worker waits in one, and sends heartbeats in another."""


class RayTrainer(Protocol):
    """What carries a run."""

    def fit(self) -> object:
        """Returns when the run is complete or stopped."""

    def close(self, limit_s: float) -> None:
        """Waits, up to a limit, until no thread of it uses Ray any more."""


def is_in_place(setting: str, viewer: Viewer) -> bool:
    """Whether the run changes its workers in place; says so once if it does not although it could have been expected.

    Args:
        setting: `run.elasticity`.
        viewer: is told.

    Raises:
        ConfigError: in_place was asked for, and this Ray is another one.
    """
    if setting == "restart":
        return False
    broken = violations()
    if not broken:
        return True
    found = broken[0] + (f", and {len(broken) - 1} more" if len(broken) > 1 else "")
    if setting == "in_place":
        raise ConfigError(
            "run.elasticity",
            f"in_place, with Ray {ray.__version__}: {found}",
            f"in_place stands on the inside of Ray Train as it is in Ray {CHECKED_ON}",
            f"set run.elasticity to restart or auto, or install Ray {CHECKED_ON}",
        )
    viewer.say(
        f"warning: each change of workers restarts all of them from the newest checkpoint, since in-place elasticity "
        f"does not know Ray {ray.__version__} ({found})",
        time.time(),
    )
    return False


def open_rendezvous(config: RunConfig, in_place: bool) -> Any:
    """The run's rendezvous; where each attempt has its own, what passes a wish to stop on to that."""
    return _actor(RendezvousActor, config.min_workers, _limits(config)) if in_place else StopRelay()


def build_trainer(
    order: Work,
    sink: Any,
    rendezvous: Any,
    in_place: bool,
    scratch: str,
    is_complete: Callable[[], bool],
    while_running: Callable[[], None],
    share: Share | None = None,
) -> RayTrainer:
    """The trainer of a run.

    Args:
        order: what is trained, and how.
        sink: handle of the event sink.
        rendezvous: of `open_rendezvous`.
        in_place: of `is_in_place`.
        scratch: a directory for Ray Train, which insists on one.
        is_complete: whether the newest checkpoint is that of the last step.
        while_running: called several times a second while the run goes on; may raise to end it.
        share: the run's part of the cluster, where it shares it with others; in place only.
    """
    config, work = order.config, ray.put(order)
    wiring = _wiring(config, rendezvous, sink, share)
    resources, use_gpu = cluster.worker_resources(config, order.accelerator), order.accelerator == "gpu"
    if not in_place:
        means = Means(
            work=run_worker,
            connect=lambda actor, first: {CONNECTIONS: Connections(work, actor, sink, first)},
            open_rendezvous=lambda num, reached, after: _actor(AttemptRendezvous, num, _limits(config), reached, after),
            resources=resources,
            use_gpu=use_gpu,
            storage=scratch,
            is_complete=is_complete,
        )
        return RestartingTrainer(means, wiring, while_running)
    from raytrain.elastic.trainer import ElasticTrainer

    return ElasticTrainer(
        run_worker,
        train_loop_config={CONNECTIONS: Connections(work, rendezvous, sink), WIRING: wiring},
        scaling_config=ScalingConfig(num_workers=config.max_workers, use_gpu=use_gpu, resources_per_worker=resources),
        run_config=RayRunConfig(name=config.name, storage_path=scratch),
        while_running=while_running,
    )


def _wiring(config: RunConfig, rendezvous: Any, sink: Any, share: Share | None) -> Wiring:
    return Wiring(
        config.min_workers,
        config.max_workers,
        config.max_failures,
        config.start_timeout_s,
        config.wait_timeout_s,
        config.slow_timeout_s,
        config.num_logical,
        rendezvous,
        sink,
        share,
    )


def _limits(config: RunConfig) -> Limits:
    return Limits(config.heartbeat_timeout_s, config.hang_timeout_s, config.slow_timeout_s)


def _actor(kind: type, *arguments: Any) -> Any:
    return cluster.pinned(kind, max_restarts=-1, max_concurrency=MOST_CALLS).remote(*arguments)
