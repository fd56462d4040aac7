"""A scheduler's state over restarts of a sweep, which Ray Tune does not keep: it saves the searcher's, and the trials'.

The state goes into the same snapshot as those, so that all of them are of one moment. Schedulers refer to trials; these
references are kept as ids, and stand for the restored trials afterwards. Runs in the driver.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

from ray import cloudpickle
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

UNFINISHED = "_FutureTrainingResult"
"""Ray Tune's class for a checkpoint that a trial is still making: it means nothing in another process."""


def dump(scheduler: TrialScheduler) -> bytes:
    """The scheduler's state."""
    stream = io.BytesIO()
    _Pickler(stream).dump(vars(scheduler))
    return stream.getvalue()


def load(state: bytes, scheduler: TrialScheduler, trials: Iterable[Trial]) -> None:
    """Gives a new scheduler of the same kind the state that `dump` made.

    Args:
        trials: those that were restored; one that is not among them is forgotten, as if it had never been.
    """
    unpickler = _Unpickler(io.BytesIO(state))
    unpickler.trials = {trial.trial_id: trial for trial in trials}
    vars(scheduler).update(unpickler.load())


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def persistent_id(self, value: Any) -> tuple[str, str] | None:
        if isinstance(value, Trial):
            return "trial", value.trial_id
        return ("unfinished", "") if type(value).__name__ == UNFINISHED else None


class _Unpickler(pickle.Unpickler):
    trials: Mapping[str, Trial] = {}

    def persistent_load(self, identity: tuple[str, str]) -> Any:
        kind, trial_id = identity
        return self.trials.get(trial_id, _Gone(trial_id)) if kind == "trial" else None


class _Gone:
    """Stands for a trial that the restored sweep does not know: for a scheduler it has ended."""

    status = Trial.TERMINATED

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id

    def is_finished(self) -> bool:
        return True
