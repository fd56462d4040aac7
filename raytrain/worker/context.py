"""What a worker is given: the run to train, and the few objects through which it touches the world.

Each of those objects has a stand-in without Ray, so that tests run the training loop in plain processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.data.loader import Loader, choose_reader
from raytrain.data.reading import ReadRequest
from raytrain.data.source import Source
from raytrain.plan import Plan
from raytrain.rendezvous.client import RendezvousClient
from raytrain.task import Task
from raytrain.worker.heartbeat import HeartbeatSender
from raytrain.worker.hooks import own_transform
from raytrain.worker.telemetry import Telemetry


@dataclass(frozen=True)
class RunSpec:
    """What is trained, and how; put into Ray's object store once and fetched by each worker.

    Args:
        config: the settings; name and storage are set.
        sources, plans: by name; "train" is the one that is trained on, the others are evaluated on.
        num_steps: optimizer steps of the whole run.
        environment: variables of the driver that a worker sets where it has none of its own.
        accelerator: "cpu" or "gpu", decided by the driver.
    """

    task: Task
    config: RunConfig
    sources: Mapping[str, Source]
    plans: Mapping[str, Plan]
    num_steps: int
    environment: Mapping[str, str]
    accelerator: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The content of run.json, which each checkpoint's manifest repeats."""

    @property
    def plan(self) -> Plan:
        """The plan of the training data."""
        return self.plans["train"]

    @property
    def eval_names(self) -> list[str]:
        """The sources that are evaluated on."""
        return [name for name in self.sources if name != "train"]

    @property
    def manifest_facts(self) -> dict[str, object]:
        """Plain values that go into the manifest of each checkpoint."""
        facts = {"name": self.config.name, "num_steps": self.num_steps, "num_logical": self.config.num_logical}
        return {**facts, **self.facts}


@dataclass(frozen=True)
class WorkerContext:
    """One worker and its connections.

    Args:
        worker: this worker's identity.
        host: the address at which peers reach this worker.
    """

    spec: RunSpec
    rendezvous: RendezvousClient
    store: CheckpointStore
    telemetry: Telemetry
    heartbeat: HeartbeatSender
    worker: str
    host: str
    node_id: str
    pid: int
    device: torch.device

    def loader(self, name: str, assigned: range, first_step: int, last_step: int) -> Loader:
        """The micro-batches of source `name` for the logical workers `assigned`, for steps [first_step, last_step)."""
        source, transform = self.spec.sources[name], own_transform(self.spec.task)
        request = ReadRequest(source, self.spec.plans[name], transform, tuple(assigned), first_step, last_step)
        return Loader(request, self.spec.config.micro_batch, choose_reader(self.spec.config.reader, source, transform))
