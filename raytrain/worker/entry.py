"""The function that Ray Train runs in each worker: connects the training loop to Ray, and sets device and threads.

torch, and all that imports it, is imported only once the environment variables of the worker are set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
import ray.train
from ray.exceptions import RaySystemError

from raytrain.errors import TaskError, WholeTracebacks, task_traceback
from raytrain.worker.network import network_variables

if TYPE_CHECKING:
    from raytrain.events.log import Batch, Receipt
    from raytrain.worker.context import RunSpec, WorkerContext

CONNECTIONS = "connections"
HEARTBEATS_PER_TIMEOUT = 5
NCCL_WITHOUT_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""NCCL's watchdog would end this process on the error of a peer; `Group` aborts instead, which requires that it does not."""


@dataclass(frozen=True)
class Connections:
    """Where a worker finds its run.

    Args:
        spec: object reference of the `RunSpec`.
        rendezvous, writer: actor handles.
        first_worker: number of the worker whose rank in Ray Train is 0; in restart mode each group continues the count.
    """

    spec: Any
    rendezvous: Any
    writer: Any
    first_worker: int = 0


def run_worker(config: Mapping[str, Any]) -> None:
    """Trains until the run is over. `config[CONNECTIONS]` holds the `Connections`."""
    with WholeTracebacks():
        _run_worker(config[CONNECTIONS])


def _run_worker(connections: Connections) -> None:
    try:
        spec: RunSpec = ray.get(connections.spec)
    except RaySystemError as error:  # a module of the task is not on this node, for example
        raise TaskError(task_traceback(error), "unpickling the task in a worker") from None
    host = ray.util.get_node_ip_address()
    os.environ.update(new_variables(host, spec.environment, os.environ))

    import torch

    from raytrain.events.kinds import OutputLine
    from raytrain.worker.failures import WorkerBroken
    from raytrain.worker.loop import TrainingLoop
    from raytrain.worker.telemetry import captured_output

    torch.set_num_threads(spec.config.num_threads)
    context = _build_context(connections, spec, host)
    loop, telemetry = TrainingLoop(context), context.telemetry
    try:
        with captured_output(lambda: loop.rank, telemetry.emit):
            loop.run()
    except WorkerBroken as error:  # not a mistake in the user's code, which would end the run
        telemetry.emit(OutputLine(rank=loop.rank, stream="stderr", text=f"{error}; its process ends"))
        telemetry.close()
        os._exit(1)
    finally:
        context.heartbeat.close()
        telemetry.close()


def new_variables(host: str, from_driver: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that a worker sets: those of its network and of the driver where it has none of its own."""
    defaults = {**network_variables(host), **from_driver}
    return {name: value for name, value in defaults.items() if name not in own} | NCCL_WITHOUT_WATCHDOG


def _build_context(connections: Connections, spec: RunSpec, host: str) -> WorkerContext:
    import torch

    from raytrain.checkpoint.store import CheckpointStore
    from raytrain.rendezvous.client import RayRendezvousClient
    from raytrain.rundir import RunDir
    from raytrain.worker.context import WorkerContext
    from raytrain.worker.heartbeat import HeartbeatSender
    from raytrain.worker.telemetry import Telemetry

    serial = connections.first_worker + ray.train.get_context().get_world_rank()
    rendezvous, name = RayRendezvousClient(connections.rendezvous), f"w{serial}"
    heartbeat = HeartbeatSender(rendezvous, name, spec.config.heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT)
    run_dir = RunDir.at(spec.config.storage, spec.config.name)
    return WorkerContext(
        spec=spec,
        rendezvous=rendezvous,
        store=CheckpointStore(run_dir, on_block=heartbeat.note_progress),  # it reads only to restore, in the training thread
        telemetry=Telemetry(_sender(connections.writer)),
        heartbeat=heartbeat,
        worker=name,
        host=host,
        node_id=ray.get_runtime_context().get_node_id(),
        pid=os.getpid(),
        device=torch.device("cuda", 0) if spec.accelerator == "gpu" else torch.device("cpu"),
    )


def _sender(writer: Any) -> Callable[[Batch, bool, float], Receipt]:
    def send(batch: Batch, durably: bool, timeout_s: float) -> Receipt:
        receipt: Receipt = ray.get(writer.deliver.remote(batch, durably), timeout=timeout_s)
        return receipt

    return send
