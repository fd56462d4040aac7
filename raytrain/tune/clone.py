"""A trial goes on from another trial's checkpoint, under settings of its own, as population based training wants it.

The checkpoint is verified, copied from storage to storage, and marked, so that the worker which restores it keeps its own
learning rates. The step number goes on, and with it the place in the data. Runs in the process of the trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from raytrain.checkpoint.manifest import CLONED_FROM, Checkpoint
from raytrain.checkpoint.store import PINS, CheckpointStore
from raytrain.config import RunConfig
from raytrain.errors import CheckpointError, ConfigError
from raytrain.rundir import CHECKPOINTS, EVENTS, RUN, RunDir
from raytrain.tune.reference import Reference

MARK = "clone.json"
PLACE_SETTINGS = ("global_batch", "seed", "shuffle_window", "drop_last")
"""Settings that say which rows a step number stands for."""


def clone(origin: Reference, own: RunDir, config: RunConfig, values: Mapping[str, Any]) -> int:
    """Makes the other trial's checkpoint the newest and only one of this run; returns its finished steps.

    Nothing is done where that was done before, and the trial was started again since.

    Args:
        origin: what the other trial has reported.
        own: directory of this trial's run.
        config: this trial's settings.
        values: of this trial.

    Raises:
        ConfigError: a step number would stand for other rows than in the other trial.
        CheckpointError: the other trial has no checkpoint any more.
    """
    mark = {"origin": asdict(origin), "values": {key: str(value) for key, value in values.items()}}
    if own.exists(MARK) and (done := own.read_json(MARK))["mark"] == mark:
        return int(done["step"])
    store = CheckpointStore(origin.run_dir)
    checkpoint = _find(store, origin)
    _check_place(origin.run_dir.read_json(RUN)["run"], config)
    files = {name: store.read(checkpoint, name) for name in checkpoint.manifest.files}
    forget(own, but_not=(EVENTS,))
    run = {**checkpoint.manifest.run, "name": config.name, CLONED_FROM: f"{origin.name}/{checkpoint.name}"}
    CheckpointStore(own).write(checkpoint.step, files, checkpoint.manifest.metrics, run)
    own.write_json({"mark": mark, "step": checkpoint.step}, MARK)
    return checkpoint.step


def forget(own: RunDir, but_not: tuple[str, ...] = ()) -> None:
    """Deletes what a run has left in its directory, other files stay."""
    for name in {RUN, EVENTS, MARK, PINS} - set(but_not):
        if own.exists(name):
            own.filesystem.delete_file(own.child(name))
    if own.exists(CHECKPOINTS):
        own.filesystem.delete_dir(own.child(CHECKPOINTS))


def _find(store: CheckpointStore, origin: Reference) -> Checkpoint:
    """The checkpoint that was reported; the newest one where that has gone since."""
    named = [checkpoint for checkpoint in store.list() if checkpoint.name == origin.checkpoint]
    checkpoint = named[0] if named else store.newest_verified()
    if checkpoint is None:
        raise CheckpointError(f"{origin.run_dir.path} has no checkpoint to go on from")
    return checkpoint


def _check_place(theirs: Mapping[str, Any], config: RunConfig) -> None:
    for name in PLACE_SETTINGS:
        here = getattr(config, name)
        if theirs.get(name) != here:
            raise ConfigError(
                f"run.{name}",
                f"{theirs.get(name)} in the trial that is cloned, {here} here",
                "a clone goes on at the same step with the next rows, so the settings that choose rows stay the same",
                f"take run.{name} out of what the scheduler may change",
            )
