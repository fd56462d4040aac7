"""The events of a run on this machine, followed while it goes on, and added to by somebody beside it.

The run's own writer appends with O_APPEND as well, so whole lines of both do not mix.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from raytrain.errors import ConfigError, StorageError
from raytrain.events.kinds import Event
from raytrain.events.log import parse_line
from raytrain.events.values import to_json
from raytrain.events.view import RunView, reduce
from raytrain.rundir import EVENTS, RunDir


class Record:
    """What a run has told so far.

    Args:
        path: of its events.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.view = RunView()

    def refresh(self) -> RunView:
        """The view after all whole lines that are there by now."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            event = parse_line(line)
            if event is not None:
                self.view = reduce(self.view, event)
        return self.view

    def add(self, event: Event) -> None:
        """Adds an event, whose time is set, in one write."""
        line = (json.dumps(to_json(event)) + "\n").encode()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def open_running(run_dir: RunDir) -> Record:
    """The record of a run that goes on, on this machine's filesystem.

    Raises:
        StorageError: there is no such run, or it is elsewhere.
        ConfigError: it has ended.
    """
    if not run_dir.is_local:
        rule = "what is done to a run is added to its events, so they lie in a directory of this machine"
        raise StorageError(run_dir.path, "not a local path", rule, "rehearse with --run.storage set to a directory")
    if not run_dir.exists(EVENTS):
        rule = f"the directory of a run holds {EVENTS}"
        raise StorageError(run_dir.path, f"no {EVENTS}", rule, "give the directory of a run: its storage, then its name")
    record = Record(Path(run_dir.child(EVENTS)))
    ended = record.refresh().ended
    if ended is not None:
        found = f"{ended.outcome} at step {ended.step}"
        raise ConfigError(run_dir.path, found, "only a run that goes on can be disturbed", "start it, then rehearse")
    return record
