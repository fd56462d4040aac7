"""The function that Ray Train runs in each worker: connects the loop to Ray, and gives it its device and threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
import ray.train

if TYPE_CHECKING:  # imported in the worker only once its environment is set
    from raytrain.config import RunConfig
    from raytrain.data.source import Source
    from raytrain.events.kinds import Event
    from raytrain.plan.order import Plan
    from raytrain.task import Task


@dataclass(frozen=True)
class Work:
    """What is to be trained, and how; put into Ray's object store once and fetched by each worker.

    Args:
        environment: variables of the driver that the workers take over where they have none of their own.
        accelerator: "cpu" or "gpu", decided by the driver.
    """

    task: Task
    config: RunConfig
    sources: Mapping[str, Source]
    plans: Mapping[str, Plan]
    num_steps: int
    run_facts: Mapping[str, Any]
    storage: str
    name: str
    environment: Mapping[str, str]
    accelerator: str


@dataclass(frozen=True)
class Connections:
    """Where a worker finds its work and its run.

    Args:
        work: object reference of a `Work`.
        rendezvous, sink: actor handles.
    """

    work: Any
    rendezvous: Any
    sink: Any


CONNECTIONS = "connections"
SINK_TIMEOUT_S = 10.0


def run_worker(config: Mapping[str, Any]) -> None:
    """Trains until the run is over. `config[CONNECTIONS]` holds the `Connections`."""
    connections: Connections = config[CONNECTIONS]
    work: Work = ray.get(connections.work)
    for name, value in work.environment.items():
        os.environ.setdefault(name, value)

    import torch

    from raytrain.checkpoint.store import CheckpointStore
    from raytrain.rendezvous.client import RayRendezvousClient
    from raytrain.rundir import RunDir
    from raytrain.worker.loop import Loop
    from raytrain.worker.prints import told_as_events
    from raytrain.worker.surroundings import Surroundings
    from raytrain.worker.telemetry import Telemetry

    torch.set_num_threads(work.config.threads_per_worker or max(1, int(work.config.cpus_per_worker)))
    telemetry = Telemetry(_sender(connections.sink))
    around = Surroundings(
        task=work.task,
        config=work.config,
        sources=work.sources,
        plans=work.plans,
        num_steps=work.num_steps,
        run_facts=work.run_facts,
        rendezvous=RayRendezvousClient(connections.rendezvous),
        store=CheckpointStore(RunDir.at(work.storage, work.name)),
        telemetry=telemetry,
        worker=f"w{ray.train.get_context().get_world_rank()}",
        host=ray.util.get_node_ip_address(),
        pid=os.getpid(),
        device=torch.device("cuda", 0) if work.accelerator == "gpu" else torch.device("cpu"),
    )
    loop = Loop(around)
    try:
        with told_as_events(lambda: loop.rank, telemetry.emit):
            loop.run()
    finally:
        telemetry.close()


def _sender(sink: Any) -> Callable[[list[Event], bool], None]:
    def send(events: list[Event], wait: bool) -> None:
        told = sink.append.remote(events)
        if wait:
            ray.get(told, timeout=SINK_TIMEOUT_S)

    return send
