"""What happened in a run, as values: the only pipe from what trains to what shows.

Each kind is a frozen dataclass of plain values, so it is one line of JSON in `events.jsonl`. Times are Unix seconds.
Producers are the driver, the controller and the workers; nobody changes an event after it is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Event:
    kind: ClassVar[str] = ""
    time: float = 0.0
    """Unix time in seconds; the sink fills it in where the producer left 0."""


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A driver begins, or goes on with, the run."""

    kind: ClassVar[str] = "run_started"
    name: str
    directory: str
    num_steps: int
    steps_per_epoch: int
    rows_per_epoch: int
    global_batch: int
    num_logical: int
    workers: tuple[int, int]
    num_parameters: int | None = None
    threads: int | None = None
    """Of PyTorch, in each worker."""


@dataclass(frozen=True, kw_only=True)
class StateRestored(Event):
    """The state of step `step` is where training goes on: steps above it that were recorded earlier do not count."""

    kind: ClassVar[str] = "state_restored"
    step: int
    checkpoint: str
    """Name of the checkpoint's directory; empty for fresh initial weights (step 0)."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A worker of a generation."""

    worker: str
    rank: int
    node: str
    pid: int
    logical: list[int]


@dataclass(frozen=True, kw_only=True)
class GenerationFormed(Event):
    """These workers train together from step `step` on."""

    kind: ClassVar[str] = "generation_formed"
    generation: int
    step: int
    members: list[Member]
    cause: str
    """"start", "loss", "join" or "drain"."""
    pause_s: float = 0.0
    """From the last finished step of the leader to here; 0 for the first generation. The parts of it:"""
    redone_s: float = 0.0
    """spent on the step in flight, which is done again;"""
    detecting_s: float = 0.0
    """until the leader noticed that a peer was gone, beyond the time that a step takes;"""
    waiting_s: float = 0.0
    """at the door, with fewer workers than the run needs. The rest is re-forming."""


@dataclass(frozen=True, kw_only=True)
class WorkerStarting(Event):
    kind: ClassVar[str] = "worker_starting"
    worker: str
    node: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class ConditionsTold(Event):
    """What a worker's floating-point results depend on in their last bits, besides the data and the code."""

    kind: ClassVar[str] = "conditions_told"
    worker: str
    device: str
    """Name of the GPU, or "CPU" and its vector instructions."""
    torch: str
    threads: int


@dataclass(frozen=True, kw_only=True)
class WorkerLost(Event):
    """A worker's process is gone, unplanned."""

    kind: ClassVar[str] = "worker_lost"
    worker: str
    node: str
    pid: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerLeaving(Event):
    """A worker is to leave after its step, since its node is announced to go away, or since others need its place."""

    kind: ClassVar[str] = "worker_leaving"
    worker: str
    node: str
    deadline: float
    """Unix time in seconds at which the node goes; 0 if that is not known."""
    reason: str = ""
    """Empty where the node is going away."""


@dataclass(frozen=True, kw_only=True)
class WorkerLeft(Event):
    """A worker has left as it was asked to; nothing is lost by that."""

    kind: ClassVar[str] = "worker_left"
    worker: str
    node: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class WaitingForWorkers(Event):
    kind: ClassVar[str] = "waiting_for_workers"
    have: int
    need: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class StepsDone(Event):
    """Committed steps `first_step`, `first_step + 1`, ...; all lists have one value per step.

    Step numbers count from 0: step s is the one that takes the run from s to s + 1 finished steps.
    """

    kind: ClassVar[str] = "steps_done"
    first_step: int
    losses: list[float]
    """Global loss: sum over the global batch / weight over the global batch."""
    weights: list[float]
    rows: list[int]
    learning_rates: list[float]
    finished: list[float]
    """Unix time in seconds at which each step was committed."""
    data_waits: list[float] = field(default_factory=list)
    """Seconds of each step for which the leader waited for its rows."""
    row_ids: list[str] | None = None
    """With audit: the rows that were trained on in each step, packed by `events.rows.pack`."""


@dataclass(frozen=True, kw_only=True)
class StepSkipped(Event):
    """The loss or gradient of a step was not finite: its rows count as used, the weights stayed as they were."""

    kind: ClassVar[str] = "step_skipped"
    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class EvaluationDone(Event):
    """Metrics by name, "valid/loss" for example, on the weights after `step` finished steps."""

    kind: ClassVar[str] = "evaluation_done"
    step: int
    metrics: dict[str, float]
    rows: int
    seconds: float
    is_best: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    kind: ClassVar[str] = "checkpoint_saved"
    step: int
    checkpoint: str
    size_bytes: int
    seconds: float
    stall_s: float
    """Seconds for which training stood still."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    kind: ClassVar[str] = "checkpoint_failed"
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class StateDigest(Event):
    """The bits of the weights and of the optimizer's state after `step` finished steps."""

    kind: ClassVar[str] = "state_digest"
    step: int
    digest: str
    """SHA-256 over all of them, in hexadecimal digits."""
    tensors: dict[str, str]
    """The first 16 digits of the SHA-256 of each, by the tensor's name."""


@dataclass(frozen=True, kw_only=True)
class FaultInjected(Event):
    """Somebody rehearses: a fault was caused on purpose, by `raytrain chaos`."""

    kind: ClassVar[str] = "fault_injected"
    fault: str
    """"kill", "stop", "drain" or "node"."""
    target: str
    """The worker, or the node's address."""


@dataclass(frozen=True, kw_only=True)
class Printed(Event):
    """A line that the user's code wrote in a worker."""

    kind: ClassVar[str] = "printed"
    rank: int
    stream: str
    """"stdout" or "stderr"."""
    text: str


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    kind: ClassVar[str] = "run_ended"
    outcome: str
    """"completed", "stopped" or "failed"."""
    step: int
    message: str = ""


KINDS: dict[str, type[Event]] = {cls.kind: cls for cls in Event.__subclasses__() if cls.kind}
