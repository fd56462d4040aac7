"""What can happen in a run? One frozen dataclass per kind of event, and its JSON form.

Events hold plain values only, so each is one line of JSON in `events.jsonl`. Times are Unix seconds. The driver, the
controller and the workers emit events; viewers, the audit and the ledger read them. Writing them is in `log`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Event:
    kind: ClassVar[str] = ""
    time: float = 0.0
    """Unix time in seconds; the event writer sets it where the producer left 0."""


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A driver starts or resumes the run."""

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
    """PyTorch threads in each worker."""
    readers: dict[str, str] = field(default_factory=dict)
    """For each source, what reads its rows, and why."""


@dataclass(frozen=True, kw_only=True)
class StateRestored(Event):
    """Training continues from the state after `step` steps; later steps that were recorded before are void."""

    kind: ClassVar[str] = "state_restored"
    step: int
    checkpoint: str
    """Name of the checkpoint's directory; empty for initial weights (step 0)."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Newer checkpoints that could not be used, each with its damage."""


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
    """"start", "loss", "join", "drain", or "retry": the same workers, since a collective failed and nobody was lost."""
    pause_s: float = 0.0
    """Seconds since the leader's last finished step; 0 for the first generation. The next three fields are parts of it."""
    redone_s: float = 0.0
    """Spent on the step in flight, which is repeated."""
    detecting_s: float = 0.0
    """Until the leader noticed the failure of a peer, beyond the time of a step."""
    waiting_s: float = 0.0
    """In the join barrier with fewer than `min_workers` workers. The rest of the pause is re-forming."""


@dataclass(frozen=True, kw_only=True)
class WorkerStarting(Event):
    kind: ClassVar[str] = "worker_starting"
    worker: str
    node: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment(Event):
    """Properties of a worker that can change the last bits of floating-point results."""

    kind: ClassVar[str] = "worker_environment"
    worker: str
    device: str
    """Name of the GPU, or "CPU" with its vector instruction set."""
    torch: str
    threads: int


@dataclass(frozen=True, kw_only=True)
class WorkerLost(Event):
    """A worker process failed or was killed."""

    kind: ClassVar[str] = "worker_lost"
    worker: str
    node: str
    pid: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerDraining(Event):
    """A worker exits after its current step, because its node drains or its resources are needed elsewhere."""

    kind: ClassVar[str] = "worker_draining"
    worker: str
    node: str
    deadline: float
    """Unix time in seconds at which the node terminates; 0 if unknown."""
    reason: str = ""
    """Empty if the node drains."""


@dataclass(frozen=True, kw_only=True)
class WorkerDrained(Event):
    """A worker exited after a drain; no step is lost."""

    kind: ClassVar[str] = "worker_drained"
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
    """Committed steps `first_step`, `first_step + 1`, ...; each list has one value per step.

    Step numbers start at 0: step s takes the run from s to s + 1 finished steps.
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
    """Seconds for which the leader waited for data, in each step."""
    row_ids: list[str] | None = None
    """With `run.audit`: the rows of each step, packed by `events.row_ids.pack`."""


@dataclass(frozen=True, kw_only=True)
class StepSkipped(Event):
    """The loss or gradient was not finite: the rows count as used, the weights are unchanged."""

    kind: ClassVar[str] = "step_skipped"
    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class EvaluationDone(Event):
    """Metrics by name, for example "valid/loss", of the weights after `step` finished steps."""

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
    """Seconds for which training was blocked."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    kind: ClassVar[str] = "checkpoint_failed"
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class StateDigest(Event):
    """Digests of the weights and the optimizer state after `step` finished steps."""

    kind: ClassVar[str] = "state_digest"
    step: int
    digest: str
    """SHA-256 over all tensors, hexadecimal."""
    tensors: dict[str, str]
    """First 16 hexadecimal digits of the SHA-256 of each tensor, by name."""


@dataclass(frozen=True, kw_only=True)
class FaultInjected(Event):
    """`raytrain chaos` injected a fault."""

    kind: ClassVar[str] = "fault_injected"
    fault: str
    """"kill", "stop", "drain" or "node"."""
    target: str
    """Name of the worker, or address of the node."""


@dataclass(frozen=True, kw_only=True)
class OutputLine(Event):
    """A line that the user's code wrote to stdout or stderr in a worker."""

    kind: ClassVar[str] = "output"
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


def to_json(event: Event) -> dict[str, Any]:
    """The event as a JSON object, `kind` first."""
    return {"kind": event.kind, **asdict(event)}


def from_json(value: dict[str, Any]) -> Event | None:
    """The event, or None if this version does not know its kind or its fields."""
    cls = KINDS.get(value.get("kind", ""))
    if cls is None:
        return None
    names = {one.name for one in fields(cls)}
    values = {key: item for key, item in value.items() if key in names}
    if cls is GenerationFormed:
        values["members"] = [Member(**member) for member in values["members"]]
    if cls is RunStarted:
        values["workers"] = tuple(values["workers"])
    try:
        return cls(**values)
    except TypeError:
        return None
