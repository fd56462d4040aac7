"""A checkpoint by reference: what Ray Tune keeps for a trial is where its run's checkpoint lies, never the weights.

It is a small file that names a run and one of its checkpoints, and says how far the trial had reported. So a clone is made
from storage to storage by the trial that wants it, and nothing passes through the driver.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ray import tune

from raytrain.rundir import RunDir

FILE = "raytrain.json"


@dataclass(frozen=True)
class Reference:
    """What a trial has reported.

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
    """What `as_checkpoint` made; None for None."""
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as directory:
        return Reference(**json.loads(Path(directory, FILE).read_text()))
