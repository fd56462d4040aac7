"""Why did an attempt end, and what does that mean for the run? Pure decisions of the driver, from public errors only.

A worker's function that raised says so itself, so what Ray reports of the others is the loss of their processes, however
this version of Ray calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raytrain.errors import CheckpointError, RaytrainError


@dataclass(frozen=True)
class Lost:
    """A worker whose process is gone.

    Args:
        worker: its name.
        reason: one line.
        preempted: whether its node was taken away, which does not count against the run.
    """

    worker: str
    reason: str
    preempted: bool


def own_failures(error: BaseException, names: tuple[str, ...], ended: Mapping[str, bool]) -> dict[str, BaseException]:
    """The errors that workers' functions raised, by worker: they end the run.

    Args:
        error: with which Ray Train ended the attempt.
        names: of its workers, by rank.
        ended: which workers' functions have ended, and whether by an error.
    """
    return {
        names[rank]: failure
        for rank, failure in _failures(error).items()
        if isinstance(failure, RaytrainError) or ended.get(names[rank], False)
    }


def losses(
    error: BaseException, names: tuple[str, ...], ended: Mapping[str, bool], given_up: Mapping[str, str]
) -> list[Lost]:
    """The workers whose processes are gone; none where Ray Train blames nobody.

    Args:
        error, names, ended: as for `own_failures`.
        given_up: workers that were killed for their silence, and why.
    """
    own = own_failures(error, names, ended)
    gone = {names[rank]: failure for rank, failure in _failures(error).items() if names[rank] not in own}
    found = []
    for worker, failure in gone.items():
        cause = getattr(failure, "health_check_failure", failure)  # Ray Train wraps what it was told
        reason = given_up.get(worker) or in_one_line(cause)
        found.append(Lost(worker, reason, worker not in given_up and bool(getattr(cause, "preempted", False))))
    return found


def is_preemption(error: BaseException) -> bool:
    """Whether Ray Train ended the attempt since a node is being taken away."""
    return hasattr(error, "preemption_info")


def is_save_that_failed(own: Mapping[str, BaseException]) -> bool:
    """Whether all that went wrong in the workers is that the last checkpoint could not be saved."""
    return bool(own) and all(isinstance(failure, CheckpointError) for failure in own.values())


def in_one_line(error: BaseException) -> str:
    """What happened, without what Ray Train wraps it in."""
    cause = getattr(error, "controller_failure", error)
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]


def _failures(error: BaseException) -> Mapping[int, BaseException]:
    failures: Mapping[int, BaseException] = getattr(error, "worker_failures", {})
    return failures
