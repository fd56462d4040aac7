"""Elastic PyTorch training on Ray: workers come and go, and the result does not change.

What a user needs is here; heavy parts are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raytrain.version import VERSION

if TYPE_CHECKING:
    from raytrain.cli.job import main as main
    from raytrain.config import RunConfig as RunConfig
    from raytrain.data import arrays as arrays
    from raytrain.data import dataset as dataset
    from raytrain.data import parquet as parquet
    from raytrain.launch.result import Result as Result
    from raytrain.launch.trainer import Trainer as Trainer
    from raytrain.sweep_config import SweepConfig as SweepConfig
    from raytrain.task import Loss as Loss
    from raytrain.task import Task as Task
    from raytrain.tune.outcome import SweepResult as SweepResult
    from raytrain.tune.sweep import Sweep as Sweep
    from raytrain.tune.trainable import trainable as trainable

_HOMES = {
    "Loss": "raytrain.task",
    "Result": "raytrain.launch.result",
    "RunConfig": "raytrain.config",
    "Sweep": "raytrain.tune.sweep",
    "SweepConfig": "raytrain.sweep_config",
    "SweepResult": "raytrain.tune.outcome",
    "Task": "raytrain.task",
    "Trainer": "raytrain.launch.trainer",
    "arrays": "raytrain.data",
    "dataset": "raytrain.data",
    "main": "raytrain.cli.job",
    "parquet": "raytrain.data",
    "trainable": "raytrain.tune.trainable",
}

__all__ = list(_HOMES)
__version__ = VERSION


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raytrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
