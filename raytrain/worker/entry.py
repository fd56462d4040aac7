"""The function that Ray Train runs in each worker: connects the loop to Ray, and gives it its device and threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
import ray.train

from raytrain.worker.network import network_variables

if TYPE_CHECKING:  # imported in the worker only once its environment is set
    from raytrain.config import RunConfig
    from raytrain.data.source import Source
    from raytrain.events.kinds import Event
    from raytrain.plan.order import Plan
    from raytrain.task import Task
    from raytrain.worker.surroundings import Surroundings


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
        first_worker: number of the worker whose rank in Ray Train is 0; where groups are started anew, it counts on.
    """

    work: Any
    rendezvous: Any
    sink: Any
    first_worker: int = 0


CONNECTIONS = "connections"
BEATS_PER_LIMIT = 5


def run_worker(config: Mapping[str, Any]) -> None:
    """Trains until the run is over. `config[CONNECTIONS]` holds the `Connections`."""
    connections: Connections = config[CONNECTIONS]
    work: Work = ray.get(connections.work)
    host = ray.util.get_node_ip_address()
    for name, value in {**network_variables(host), **work.environment}.items():
        os.environ.setdefault(name, value)

    import torch

    from raytrain.events.kinds import Printed
    from raytrain.worker.loop import Loop
    from raytrain.worker.prints import told_as_events
    from raytrain.worker.state import StateDiffers

    torch.set_num_threads(work.config.num_threads)
    around = _surroundings(connections, work, host)
    loop, telemetry = Loop(around), around.telemetry
    try:
        with told_as_events(lambda: loop.rank, telemetry.emit):
            loop.run()
    except StateDiffers as error:  # not a mistake in the user's code, which would end the run
        telemetry.emit(Printed(rank=loop.rank, stream="stderr", text=f"{error}; its process ends"))
        telemetry.close()
        os._exit(1)
    finally:
        around.pulse.close()
        telemetry.close()


def _surroundings(connections: Connections, work: Work, host: str) -> Surroundings:
    import torch

    from raytrain.checkpoint.store import CheckpointStore
    from raytrain.rendezvous.client import RayRendezvousClient
    from raytrain.rundir import RunDir
    from raytrain.worker.pulse import Pulse
    from raytrain.worker.surroundings import Surroundings
    from raytrain.worker.telemetry import Telemetry

    serial = connections.first_worker + ray.train.get_context().get_world_rank()
    rendezvous, name = RayRendezvousClient(connections.rendezvous), f"w{serial}"
    return Surroundings(
        task=work.task,
        config=work.config,
        sources=work.sources,
        plans=work.plans,
        num_steps=work.num_steps,
        run_facts=work.run_facts,
        rendezvous=rendezvous,
        store=CheckpointStore(RunDir.at(work.storage, work.name)),
        telemetry=Telemetry(_sender(connections.sink)),
        pulse=Pulse(rendezvous, name, work.config.heartbeat_timeout_s / BEATS_PER_LIMIT),
        worker=name,
        host=host,
        node_id=ray.get_runtime_context().get_node_id(),
        pid=os.getpid(),
        device=torch.device("cuda", 0) if work.accelerator == "gpu" else torch.device("cpu"),
    )


def _sender(sink: Any) -> Callable[[list[Event], float], None]:
    def send(events: list[Event], limit_s: float) -> None:
        ray.get(sink.append.remote(events), timeout=limit_s)

    return send
