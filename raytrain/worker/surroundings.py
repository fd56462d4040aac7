"""What a worker is given: the work, and the few things through which it touches the world.

Each of them has a stand-in without Ray, so that the loop can be proved with plain processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.data.feed import Feed, choose_reader
from raytrain.data.source import Source
from raytrain.plan.order import Plan
from raytrain.rendezvous.client import RendezvousClient
from raytrain.task import Task
from raytrain.worker.hooks import own_transform
from raytrain.worker.pulse import Pulse
from raytrain.worker.telemetry import Telemetry


@dataclass(frozen=True)
class Surroundings:
    """The work of one worker and its connections.

    Args:
        sources, plans: by name; "train" is the one that is trained on.
        num_steps: optimizer steps of the whole run.
        run_facts: plain values that go into each checkpoint's manifest.
        worker: this worker's identity.
        host: the address at which peers reach this worker.
    """

    task: Task
    config: RunConfig
    sources: Mapping[str, Source]
    plans: Mapping[str, Plan]
    num_steps: int
    run_facts: Mapping[str, object]
    rendezvous: RendezvousClient
    store: CheckpointStore
    telemetry: Telemetry
    pulse: Pulse
    worker: str
    host: str
    node_id: str
    pid: int
    device: torch.device

    @property
    def plan(self) -> Plan:
        """The plan of the training data."""
        return self.plans["train"]

    def feed(self, name: str, held: range, first_step: int, last_step: int) -> Feed:
        """The micro-batches of source `name` for the logical workers `held`, from one step up to before another."""
        source, transform = self.sources[name], own_transform(self.task)
        return Feed(
            source,
            self.plans[name],
            transform,
            held,
            first_step=first_step,
            last_step=last_step,
            micro_batch=self.config.micro_batch,
            reader=choose_reader(source, transform),
        )
