"""Before a worker's first generation: the first pass, out of the others' way, and the newest checkpoint for a leader."""

from __future__ import annotations

import math

import numpy as np

from raytrain.checkpoint.manifest import CLONED_FROM
from raytrain.checkpoint.retention import best_of
from raytrain.checkpoint.store import CheckpointStore
from raytrain.data.batch import to_tensors
from raytrain.rendezvous.state import NO_STATE
from raytrain.worker.buffers import StepBuffers
from raytrain.worker.determinism import named_operators
from raytrain.worker.hooks import as_sum, autocast, on_device, own_transform, user_code
from raytrain.worker.state import Boundary, TrainState
from raytrain.worker.surroundings import Surroundings


def warm_up(around: Surroundings, state: TrainState) -> None:
    """One forward and backward pass that leaves no trace: whatever the first pass has to set up is set up after it."""
    rows = around.plan.rows(0, 0)[: around.config.micro_batch]
    columns = around.sources["train"].take(rows)
    if (transform := own_transform(around.task)) is not None:
        with user_code("transform"):
            columns = transform(columns)
    buffers = StepBuffers(state.model)
    buffers.begin()
    state.model.train()
    batch = on_device(to_tensors(columns), around.device)
    with user_code("loss in the warm-up pass"), named_operators():
        with autocast(around.config.precision, around.device):
            loss, _ = as_sum(around.task.loss(state.model, batch), len(rows), "loss")
        loss.backward()  # type: ignore[no-untyped-call]
    state.optimizer.zero_grad()
    buffers.rewind()


def restore_newest(state: TrainState, store: CheckpointStore, best: str) -> str:
    """Puts the newest verified checkpoint into `state`; step 0 where there is none.

    Returns:
        the checkpoint's name, or "" for initial weights.
    """
    checkpoint = store.newest_verified()
    if checkpoint is None:
        state.step = 0
        return ""
    files = {name: store.read(checkpoint, name) for name in checkpoint.manifest.files}
    state.restore(files, keeps_settings=CLONED_FROM in checkpoint.manifest.run)
    metrics = dict(checkpoint.manifest.metrics)
    state.boundary = Boundary(state.step if metrics else NO_STATE, _best_score(store, best), metrics=metrics)
    return checkpoint.name


def _best_score(store: CheckpointStore, best: str) -> float | None:
    checkpoint = best_of(store.list(), best)
    score = checkpoint.manifest.metrics.get(best.partition(":")[2], np.nan) if checkpoint else np.nan
    return float(score) if math.isfinite(score) else None
