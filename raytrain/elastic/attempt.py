"""One attempt of restart mode: a `TorchTrainer` of a fixed size, its rendezvous, and how the driver sees it.

Uses public Ray only. One `FitActor` runs Ray Train for every attempt. The rendezvous forms generations of exactly the
attempt's workers, and knows which of them have started, finished or died. When the next attempt starts, and how large it is,
is decided in `restart`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import ray
import ray.train
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.train import BackendConfig, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer

from raytrain.elastic.controller_config import worker_name
from raytrain.elastic.environment import environment_set
from raytrain.errors import InternalError, RaytrainError
from raytrain.events.kinds import WorkerStarting
from raytrain.rendezvous.actor import RendezvousActor
from raytrain.rendezvous.health import HealthTimeouts, Heartbeat, HeartbeatReply
from raytrain.rendezvous.state import NO_STATE, Generation, JoinRequest

PROBE_EVERY_S, REPLY_TIMEOUT_S = 0.5, 5.0
ENVIRONMENT = {"RAY_CHDIR_TO_TRIAL_DIR": "0"}
"""Read by Ray Train when `fit` starts: workers stay in their directory."""
BUDGETS = ("max_failures", "controller_failure_limit", "max_preemption_failures")
"""Fields of `FailureConfig` that let Ray Train retry; not every version has all of them."""

TrainFunction = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Loss:
    """Why the process of a worker is gone; `evicted`: the rendezvous killed it because it was silent or stuck."""

    reason: str
    preempted: bool = False
    evicted: bool = False


@dataclass(frozen=True)
class AttemptStatus:
    """What the driver needs to know of an attempt; `step` and `generation` are the latest that were reported."""

    members: tuple[str, ...] = ()
    """Of the latest generation, in the order of ranks."""
    step: int = NO_STATE
    generation: int = 0
    started: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Node address and process of each worker whose train function has started."""
    finished: dict[str, RaytrainError | None] = field(default_factory=dict)
    """Workers whose train functions have ended, with the error if there was one."""
    lost: dict[str, Loss] = field(default_factory=dict)


class AttemptRendezvous(RendezvousActor):
    """A rendezvous that never forms a smaller generation: a worker that has lost a peer waits until the attempt ends.

    Args:
        num_workers: of the attempt.
        timeouts: after which a silent or stuck worker is evicted.
        max_step: steps of earlier attempts; up to there workers report each step at once.
        last: number of the latest generation of earlier attempts.
    """

    def __init__(
        self, num_workers: int, timeouts: HealthTimeouts | None = None, max_step: int = NO_STATE, last: int = 0
    ) -> None:
        super().__init__(num_workers, timeouts)
        self._state.max_step, self._last = max_step, last
        self._step, self._probed_at = NO_STATE, 0.0
        self._started: dict[str, tuple[str, int]] = {}
        self._finished: dict[str, RaytrainError | None] = {}
        self._lost: dict[str, Loss] = {}
        self._came_from: dict[str, int] = {}

    async def begin(self, worker: str, node: str, pid: int, handle: Any) -> None:
        """The train function of `worker` starts."""
        self._started[worker], self._handles[worker] = (node, pid), handle
        await self.expect(worker)

    async def end(self, worker: str, error: RaytrainError | None) -> None:
        """The train function of `worker` has ended: its silence means nothing from now on."""
        self._finished[worker] = error
        self._health.forget(worker)

    async def heartbeat(self, heartbeat: Heartbeat, handle: Any = None) -> HeartbeatReply:
        self._step = max(self._step, heartbeat.step)
        return await super().heartbeat(heartbeat, handle)

    async def join(self, request: JoinRequest, handle: Any) -> Generation | None:
        self._step, self._came_from[request.worker] = max(self._step, request.step), request.last_generation
        last = max(request.last_generation, self._last)
        return await super().join(replace(request, last_generation=last), handle)

    async def kill_workers(self) -> None:
        """Kills the processes of the workers, so that Ray Train ends the group and frees its resources."""
        for handle in self._handles.values():
            ray.kill(handle)

    async def report(self) -> AttemptStatus:
        """The status, after a liveness probe of all workers."""
        if time.monotonic() >= self._probed_at + PROBE_EVERY_S:
            self._probed_at = time.monotonic()
            workers = [worker for worker in self._handles if worker not in self._finished | self._lost]
            losses = await asyncio.gather(*(find_loss(self._handles[worker]) for worker in workers))
            self._lost |= {worker: loss for worker, loss in zip(workers, losses, strict=True) if loss}
        generation = self._state.generation
        members = tuple(member.worker for member in generation.members)
        return AttemptStatus(
            members,
            self._step,
            generation.number,
            dict(self._started),
            dict(self._finished),
            self._losses(generation.number),
        )

    def _losses(self, generation: int) -> dict[str, Loss]:
        """Without survivors of the latest generation that Ray Train has killed since."""
        evicted = {worker: Loss(reason, evicted=True) for worker, reason in self._evicted.items()}
        lost = {worker: loss for worker, loss in (self._lost | evicted).items() if worker not in self._finished}
        survivors = {worker for worker, number in self._came_from.items() if number == generation > 0}
        return {worker: loss for worker, loss in lost.items() if worker not in survivors} or lost


async def find_loss(handle: Any) -> Loss | None:
    """Why the process of an actor is gone; None if it lives, or if Ray does not know yet."""
    try:
        await asyncio.wait_for(handle.__ray_ready__.remote(), PROBE_EVERY_S)
    except (ActorUnavailableError, GetTimeoutError, asyncio.TimeoutError, TimeoutError):
        return None
    except RayActorError as error:
        return Loss(first_line(error), preempted=bool(getattr(error, "preempted", False)))
    return None


class NoProcessGroup(BackendConfig):
    """Ray Train forms no process group, since the workers form their own."""

    backend = "gloo"


class FitActor:
    """Runs the `TorchTrainer` of each attempt. The driver does not wait for one, since it ends seconds after its workers."""

    def __init__(self) -> None:
        self._variables = contextlib.ExitStack()
        self._variables.enter_context(environment_set(ENVIRONMENT))

    def fit(
        self, train: TrainFunction, config: dict[str, Any], scaling: ScalingConfig, run_config: RunConfig
    ) -> TrainingFailedError | None:
        """Returns the error with which Ray Train ended the group."""
        known = {budget.name for budget in fields(FailureConfig)}
        no_retries = FailureConfig(**{name: 0 for name in BUDGETS if name in known})
        trainer = TorchTrainer(
            train,
            train_loop_config=config,
            torch_config=NoProcessGroup(),
            scaling_config=scaling,
            run_config=replace(run_config, failure_config=no_retries),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            return error
        return None


def reporting(train: TrainFunction, rendezvous: Any, writer: Any, first_worker: int) -> TrainFunction:
    """`train`, with its start and its end reported to the rendezvous; runs in the worker `first_worker` + its rank."""

    def run(config: Mapping[str, Any]) -> None:
        worker = worker_name(first_worker + ray.train.get_context().get_world_rank())
        node, pid, handle = ray.util.get_node_ip_address(), os.getpid(), ray.get_runtime_context().current_actor
        writer.append.remote([WorkerStarting(worker=worker, node=node, pid=pid)])
        with contextlib.suppress(ActorUnavailableError):  # it is being restarted, and learns of us by our heartbeats
            ray.get(rendezvous.begin.remote(worker, node, pid, handle))
        try:
            train(config)
        finally:
            error = sys.exc_info()[1]
            if error is not None and not isinstance(error, RaytrainError):
                error = InternalError("".join(traceback.format_exception(error)))  # which can be pickled for certain
            with contextlib.suppress(RayError):  # then the driver learns it from Ray Train
                ray.get(rendezvous.end.remote(worker, error), timeout=REPLY_TIMEOUT_S)

    return run


class Attempt:
    """A group of workers that is started once, as the driver sees it; `result` refers to what `FitActor.fit` returns."""

    def __init__(self, result: Any, rendezvous: Any, names: tuple[str, ...]) -> None:
        self.rendezvous, self.names, self._result = rendezvous, names, result
        self.status, self._call = AttemptStatus(), rendezvous.report.remote()
        self.has_ended = False
        self.error: BaseException | None = None
        """Whether Ray Train has ended the group, and with which error."""
        self.is_to_stop = False
        """Whether it was asked to save and to end, so that a larger one can follow."""

    @property
    def has_finished(self) -> bool:
        """Whether all train functions have returned, rather than that the group broke."""
        return len(self.status.finished) == len(self.names) or (self.has_ended and self.error is None)

    @property
    def is_over(self) -> bool:
        return self.has_finished or self.has_ended or bool(self.status.lost) or any(self.status.finished.values())

    def poll(self, timeout_s: float = 0.0) -> None:
        """Takes the status that was requested last time, if it comes in time, and requests the next one."""
        if ray.wait([self._result], timeout=0)[0]:
            self.has_ended = True
            try:
                self.error = ray.get(self._result)
            except RayActorError as error:
                self.error = error
        if not ray.wait([self._call], timeout=timeout_s)[0]:
            return
        with contextlib.suppress(RayActorError):  # it is being restarted and forgets, so what was known is kept
            new, old = ray.get(self._call), self.status
            started, finished = old.started | new.started, old.finished | new.finished
            self.status = replace(new, started=started, finished=finished, lost=old.lost | new.lost)
        self._call = self.rendezvous.report.remote()

    def stop(self) -> None:
        """Asks the workers to save and to end; repeated, since a restarted rendezvous has forgotten it."""
        self.is_to_stop = True
        self.rendezvous.stop.remote()

    def close(self) -> None:
        """Kills the workers that are left; those that start later find no rendezvous, and end."""
        if not self.has_finished:
            ray.wait([self.rendezvous.kill_workers.remote()], timeout=REPLY_TIMEOUT_S)
        ray.kill(self.rendezvous)


@dataclass(frozen=True)
class AttemptFactory:
    """Starts attempts.

    Args:
        train: the train function.
        connect: its configuration, from the attempt's rendezvous and the serial number of the first worker.
        open_rendezvous: starts an `AttemptRendezvous`, from its arguments `num_workers`, `max_step` and `last`.
        fit: handle of a `FitActor`.
        resources: of one worker.
        use_gpu: whether a worker has a GPU.
        run_config: of Ray Train.
    """

    train: TrainFunction
    connect: Callable[[Any, int], dict[str, Any]]
    open_rendezvous: Callable[[int, int, int], Any]
    fit: Any
    resources: Mapping[str, float]
    use_gpu: bool
    run_config: RunConfig

    def start(self, writer: Any, num_workers: int, first_worker: int, max_step: int, last: int) -> Attempt:
        """An attempt with workers from number `first_worker` on; see `AttemptRendezvous` for the other arguments."""
        resources = dict(self.resources)
        scaling = ScalingConfig(num_workers=num_workers, use_gpu=self.use_gpu, resources_per_worker=resources)
        rendezvous = self.open_rendezvous(num_workers, max_step, last)
        train, config = reporting(self.train, rendezvous, writer, first_worker), self.connect(rendezvous, first_worker)
        run_config = replace(self.run_config, name=f"from-{worker_name(first_worker)}")
        result = self.fit.fit.remote(train, config, scaling, run_config)
        return Attempt(result, rendezvous, tuple(worker_name(first_worker + rank) for rank in range(num_workers)))


def first_line(error: BaseException) -> str:
    """What happened, without what Ray Train wraps it in."""
    cause = getattr(error, "controller_failure", error)
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
