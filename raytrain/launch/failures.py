"""Ray Train's errors as ours: the user's traceback, or what was lost, without the layers in between."""

from __future__ import annotations

from ray.train import ControllerError, WorkerGroupError
from ray.train.v2.api.exceptions import TrainingFailedError

from raytrain.errors import FourPartError, InternalError, RaytrainError, TaskError, WorkersLostError


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
