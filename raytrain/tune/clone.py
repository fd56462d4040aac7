"""How does a trial continue from another trial's checkpoint, as population based training requires?

What Ray Tune stores as a trial's checkpoint is a small file that names the run's checkpoint (`Reference`), never the
weights. `clone` copies the named checkpoint from storage to storage and verifies it; the step, and so the position in the
data, is kept, while the learning rates are the clone's own. Runs in the trial's process.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ray import tune

from raytrain.checkpoint.manifest import CLONED_FROM, Checkpoint
from raytrain.checkpoint.store import PINS, CheckpointStore
from raytrain.config import RunConfig
from raytrain.errors import CheckpointError, ConfigError
from raytrain.rundir import CHECKPOINTS, EVENTS, RUN, RunDir

FILE = "raytrain.json"
"""Of a reference, in Ray Tune's checkpoint."""
MARK = "clone.json"
"""Of a finished clone, in the run's directory."""
ROW_SETTINGS = ("global_batch", "seed", "shuffle_window", "drop_last")
"""Settings that determine which rows a step trains on."""


@dataclass(frozen=True)
class Reference:
    """A run's checkpoint, by name.

    Args:
        storage, name: of the trial's run.
        step: finished steps at the report.
        checkpoint: name of the newest checkpoint at that time.
    """

    storage: str
    name: str
    step: int
    checkpoint: str

    @property
    def run_dir(self) -> RunDir:
        return RunDir.at(self.storage, self.name)

    @contextmanager
    def as_checkpoint(self) -> Iterator[tune.Checkpoint]:
        """For `tune.report`, which copies it."""
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, FILE).write_text(json.dumps(asdict(self)))
            yield tune.Checkpoint.from_directory(directory)


def read_reference(checkpoint: tune.Checkpoint | None) -> Reference | None:
    """The reference in a checkpoint of Ray Tune; None for None."""
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as directory:
        return Reference(**json.loads(Path(directory, FILE).read_text()))


def clone(origin: Reference, own: RunDir, config: RunConfig, values: Mapping[str, Any]) -> int:
    """Makes the other trial's checkpoint the only one of this run; returns its finished steps.

    Does nothing if the same clone was made before the trial was restarted.

    Args:
        origin: last report of the other trial.
        own: directory of this trial's run.
        config: this trial's settings.
        values: this trial's hyperparameters.

    Raises:
        ConfigError: a step trains on other rows than in the other trial.
        CheckpointError: the other trial has no checkpoint any more.
    """
    mark = {"origin": asdict(origin), "values": {key: str(value) for key, value in values.items()}}
    if own.exists(MARK) and (done := own.read_json(MARK))["mark"] == mark:
        return int(done["step"])
    store = CheckpointStore(origin.run_dir)
    checkpoint = _find(store, origin)
    _check_rows(origin.run_dir.read_json(RUN)["run"], config)
    files = {name: store.read(checkpoint, name) for name in checkpoint.manifest.files}
    delete_run(own, keep=(EVENTS,))
    run = {"name": config.name, CLONED_FROM: f"{origin.name}/{checkpoint.name}"}  # its other facts are the other trial's
    CheckpointStore(own).write(checkpoint.step, files, checkpoint.manifest.metrics, run)
    own.write_json({"mark": mark, "step": checkpoint.step}, MARK)
    return checkpoint.step


def delete_run(own: RunDir, keep: tuple[str, ...] = ()) -> None:
    """Deletes a run's files, but not those of Ray Tune in the same directory."""
    for name in {RUN, EVENTS, MARK, PINS} - set(keep):
        if own.exists(name):
            own.filesystem.delete_file(own.child(name))
    if own.exists(CHECKPOINTS):
        own.filesystem.delete_dir(own.child(CHECKPOINTS))


def _find(store: CheckpointStore, origin: Reference) -> Checkpoint:
    """The checkpoint that was reported, or the newest one if retention has deleted that."""
    named = [checkpoint for checkpoint in store.list() if checkpoint.name == origin.checkpoint]
    checkpoint = named[0] if named else store.newest_verified()
    if checkpoint is None:
        raise CheckpointError(f"{origin.run_dir.path} has no checkpoint to clone")
    return checkpoint


def _check_rows(origin: Mapping[str, Any], config: RunConfig) -> None:
    for name in ROW_SETTINGS:
        here = getattr(config, name)
        if origin.get(name) != here:
            raise ConfigError(
                f"run.{name}",
                f"{origin.get(name)} in the trial that is cloned, {here} here",
                "a clone continues at the same step with the next rows, so the settings that choose rows stay the same",
                f"remove run.{name} from what the scheduler may change",
            )
