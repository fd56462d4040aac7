"""Ray Train's errors as ours: the user's traceback, or what was lost, without the layers in between."""

from __future__ import annotations

from ray.train import ControllerError, WorkerGroupError
from ray.train.v2.api.exceptions import TrainingFailedError

from raytrain.errors import DeadlyRowsError, FourPartError, InternalError, RaytrainError, TaskError, WorkersLostError
from raytrain.plan.order import Plan


def own_error(error: TrainingFailedError) -> RaytrainError:
    """The cause of a failed run; where several ranks failed, the user's own error comes first."""
    if isinstance(error, WorkerGroupError):
        causes = list(error.worker_failures.values())
        order = (TaskError, FourPartError, WorkersLostError, RaytrainError)
        for kind in order:
            for cause in causes:
                if isinstance(cause, kind):
                    return cause
    if isinstance(error, ControllerError) and isinstance(error.controller_failure, RaytrainError):
        return error.controller_failure
    return InternalError(str(error))


def with_rows(error: RaytrainError, plan: Plan) -> RaytrainError:
    """The error, with the rows to blame where it blames some; the controller knows of shares only."""
    if not isinstance(error, DeadlyRowsError):
        return error
    rows = [int(row) for logical in error.logical for row in plan.rows(error.step, logical)]
    return DeadlyRowsError(error.step, error.logical, error.cause, tuple(rows))
