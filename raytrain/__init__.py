"""Elastic PyTorch training on Ray: workers come and go, and the result does not change.

What a user needs is here; heavy parts are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytrain.cli.job import main as main
    from raytrain.config import RunConfig as RunConfig
    from raytrain.data import arrays as arrays
    from raytrain.data import dataset as dataset
    from raytrain.data import parquet as parquet
    from raytrain.launch.result import Result as Result
    from raytrain.launch.trainer import Trainer as Trainer
    from raytrain.task import Loss as Loss
    from raytrain.task import Task as Task

_HOMES = {
    "Loss": "raytrain.task",
    "Result": "raytrain.launch.result",
    "RunConfig": "raytrain.config",
    "Task": "raytrain.task",
    "Trainer": "raytrain.launch.trainer",
    "arrays": "raytrain.data",
    "dataset": "raytrain.data",
    "main": "raytrain.cli.job",
    "parquet": "raytrain.data",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raytrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
