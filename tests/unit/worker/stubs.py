"""A worker context without Ray, for tests of parts of the training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raytrain.config import RunConfig
from raytrain.launch.schedule import build_schedule
from raytrain.rendezvous.state import Generation
from raytrain.worker.context import RunSpec, WorkerContext
from raytrain.worker.heartbeat import HeartbeatSender
from raytrain.worker.state import EvaluationState, TrainState, build_state
from tests.support.tasks import WithDropout

CPU = torch.device("cpu")


class FakeHeartbeat(HeartbeatSender):
    """Sends nothing: it keeps the activities and the finished steps of the training thread."""

    def __init__(self) -> None:
        self._activity = ("", 0, 0.0)
        self.activities: list[str] = []
        self.finished: list[int] = []

    def set_activity(self, activity: str, variant: int = 0) -> None:
        self._activity = (activity, variant, 0.0)
        self.activities.append(activity)

    def begin_step(self, step: int) -> None:
        pass

    def finish_step(self, step: int) -> None:
        self.finished.append(step)

    def enter_generation(self, generation: Generation, abort: Callable[[], None]) -> None:
        pass

    def leave_generation(self) -> None:
        pass


def spec_of(task: Any, **settings: Any) -> RunSpec:
    """What is trained, as the driver would build it."""
    config = RunConfig(**{"logical_workers": 2, "global_batch": 8, "seed": 5} | settings)
    planned = build_schedule(task, config)
    return RunSpec(task, config, planned.sources, planned.plans, planned.num_steps, {}, "cpu")


def context_of(spec: Any, store: Any = None, telemetry: Any = None) -> WorkerContext:
    unused: Any = None
    return WorkerContext(spec, unused, store, telemetry, FakeHeartbeat(), "w0", "127.0.0.1", "", 1, CPU)


def built(task: Any = None, seed: int = 5) -> TrainState:
    """The initial state of a small task."""
    return build_state(spec_of(task or WithDropout(), seed=seed, steps=10), CPU)


def trained(steps: int) -> TrainState:
    """The same after some steps of its optimizer and schedule."""
    state = built()
    for _ in range(steps):
        state.optimizer.zero_grad()
        state.model(torch.ones(4, 12)).sum().backward()
        state.optimizer.step()
        state.scheduler.step()
    state.step, state.evaluation = steps, EvaluationState(2, 0.5)
    return state
