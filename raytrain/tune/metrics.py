"""Which metrics will the trials of a sweep report? Found out in the driver, before any of them starts.

The names of a task's metrics are in its code. The code is run on tensors without values (PyTorch's meta device), which costs
neither memory nor time; where that does not work, the first evaluation tells.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch

from raytrain.data.batch import to_tensors
from raytrain.data.source import Source
from raytrain.errors import ConfigError, TaskError
from raytrain.launch.work import Schedule
from raytrain.task import Task
from raytrain.worker.hooks import own_transform, user_code


def check_metric(metric: str, task: Task, work: Schedule) -> None:
    """A trial reports this metric, as far as that can be known.

    Raises:
        ConfigError: it does not.
    """
    sources = [name for name in work.sources if name != "train"]
    if not sources:
        rule = "trials are compared by an evaluation: the task's `data` returns another source besides train"
        raise ConfigError("sweep.metric", metric, rule, 'return {"train": ..., "valid": ...}')
    source, _, name = metric.partition("/")
    known_names = _metric_names(task, work.sources[sources[0]])
    names = {"loss", *({name} if known_names is None else known_names)}
    if source in sources and name in names:
        return
    known = ", ".join(f"{one}/{other}" for one in sources for other in sorted(names))
    raise ConfigError("sweep.metric", metric or "not given", f"is a metric that a trial reports: {known}", "choose one")


def _metric_names(task: Task, source: Source) -> set[str] | None:
    """The names of the task's metrics; None where they cannot be known without values."""
    if type(task).metrics is Task.metrics:
        return set()
    columns = source.take(np.arange(min(2, source.num_rows)))
    try:
        with user_code("metrics"), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            transform = own_transform(task)
            batch = to_tensors(transform(columns) if transform else columns)
            with torch.device("meta"):
                model = task.model().to("meta")
            return set(task.metrics(model, {name: tensor.to("meta") for name, tensor in batch.items()}))
    except TaskError:
        return None
