"""A trial without workers: it replays a metric curve, through the reports, checkpoints and events of a real run.

So Ray Tune's schedulers and searchers are tested on what they see of a trial, in a fraction of its CPU time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.events import kinds
from raytrain.events.log import EventLog
from raytrain.launch.monitor import Viewer
from raytrain.rundir import RUN, RunDir
from raytrain.task import Task
from raytrain.tune.trial import SweepOptions, TrialTemplate, run_trial

METRIC = "valid/mae"
EPOCH = 13  # steps


def replay_trial(template: TrialTemplate, options: SweepOptions, values: Mapping[str, Any]) -> None:
    """Instead of `raytrain.tune.trial.run_trial`."""
    make_trainer: Any = ReplayTrainer
    run_trial(template, options, values, make_trainer)


class ReplayTrainer:
    """The model is a number that each epoch halves if the learning rate is 0.05, and else decreases less."""

    def __init__(self, task: Task, config: RunConfig, lease: Any) -> None:
        self.lr: float = task.lr  # type: ignore[attr-defined]
        self.config, self.run_dir = config, RunDir.at(config.storage, config.name)
        self.store, self.log = CheckpointStore(self.run_dir), EventLog(self.run_dir)

    def fit(self, viewer: Viewer) -> None:
        num_epochs = self.config.epochs or 1
        self.run_dir.write_json({"run": self.config.model_dump(mode="json"), "num_steps": num_epochs * EPOCH}, RUN)
        newest = self.store.newest_verified()
        step, model = (newest.step, self.store.read(newest, "model.json")) if newest else (0, b"1.0")
        shape: dict[str, Any] = {"num_steps": num_epochs * EPOCH, "steps_per_epoch": EPOCH, "rows_per_epoch": 203}
        started = kinds.RunStarted(name="", directory="", global_batch=16, num_logical=1, workers=(1, 1), **shape)
        self.emit(viewer, started, kinds.StateRestored(step=step, checkpoint=newest.name if newest else ""))
        value = float(json.loads(model))
        for _ in range(step // EPOCH, num_epochs):
            rows: dict[str, Any] = {"weights": [16.0] * EPOCH, "rows": [16] * EPOCH, "finished": [0.0] * EPOCH}
            rates = {"losses": [value] * EPOCH, "learning_rates": [self.lr] * EPOCH}
            self.emit(viewer, kinds.StepsDone(first_step=step, **rates, **rows))
            step, value = step + EPOCH, value * (0.5 + min(0.5, abs(math.log10(max(self.lr, 1e-9) / 0.05))))
            self.emit(viewer, kinds.EvaluationDone(step=step, metrics={METRIC: value}, rows=37, seconds=0.0, is_best=False))
            saved = self.store.write(step, {"model.json": json.dumps(value).encode()}, {METRIC: value}, {})
            done = kinds.CheckpointSaved(step=step, checkpoint=saved.name, size_bytes=1, seconds=0.0, stall_s=0.0)
            self.emit(viewer, done)
        self.emit(viewer, kinds.RunEnded(outcome="completed", step=step))

    def emit(self, viewer: Viewer, *events: kinds.Event) -> None:
        self.log.append(events)
        viewer.on_events(events)
