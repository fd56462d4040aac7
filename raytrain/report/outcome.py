"""What is recorded about a run? Its `run.json`, and the losses, digests and checkpoint files for a comparison.

Steps that a restored older checkpoint undid are left out. Judges nothing: that is done by `audit` and `comparison`. Only
reads, in any process, also during the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raytrain.checkpoint.store import CheckpointStore
from raytrain.errors import StorageError
from raytrain.events.curve import curve
from raytrain.events.kinds import Event, StateDigest, StateRestored, WorkerEnvironment
from raytrain.events.log import read
from raytrain.rundir import EVENTS, RUN, RunDir


@dataclass(frozen=True)
class Outcome:
    """The recorded outcome of a run.

    Args:
        directory: the run's directory.
        metadata: the content of run.json.
        losses: global loss by step number, from 0.
        digests: by number of finished steps.
        files: SHA-256 of each file of each existing checkpoint, by number of finished steps, then by name.
        environment: device, version of torch and threads of the workers; several values if they differ.
    """

    directory: str
    metadata: Mapping[str, Any]
    losses: Mapping[int, float] = field(default_factory=dict)
    digests: Mapping[int, StateDigest] = field(default_factory=dict)
    files: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def read_metadata(run_dir: RunDir) -> dict[str, Any]:
    """The content of `run.json`, checked to contain a plan.

    Raises:
        StorageError: there is no run, or the file cannot be read or is invalid.
    """
    try:
        metadata = run_dir.read_json(RUN)
    except (FileNotFoundError, NotADirectoryError):
        rule, fix = f"a run directory contains {RUN}", "give the directory of a run: <run.storage>/<run.name>"
        raise StorageError(run_dir.path, f"no {RUN}", rule, fix) from None
    except ValueError as error:
        raise invalid_metadata(run_dir, f"not JSON: {error}") from None
    except OSError as error:
        raise invalid_metadata(run_dir, str(error)) from None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("plan"), dict):
        raise invalid_metadata(run_dir, "no plan")
    return metadata


def invalid_metadata(run_dir: RunDir, found: str) -> StorageError:
    """The error for an invalid `run.json`."""
    return StorageError(run_dir.child(RUN), found, "contains the plan of the run", "restore the file, or run again")


def outcome_of(run_dir: RunDir) -> Outcome:
    """Reads the directory of a run; O(steps + digests) memory.

    Raises:
        StorageError: there is no run, or it cannot be read.
    """
    metadata = read_metadata(run_dir)
    try:
        events = list(read(run_dir))
    except OSError as error:
        rule, fix = "the event log can be read", "fix the cause named above"
        raise StorageError(run_dir.child(EVENTS), str(error), rule, fix) from None
    return Outcome(
        run_dir.path,
        metadata,
        {step: record.loss for step, record in curve(events).items()},
        digests(events),
        {
            checkpoint.step: {name: entry.sha256 for name, entry in checkpoint.manifest.files.items()}
            for checkpoint in CheckpointStore(run_dir).list()
        },
        environment(events),
    )


def digests(events: Iterable[Event]) -> dict[int, StateDigest]:
    """The valid digests by number of finished steps: the newest of each step, without those that were undone."""
    found: dict[int, StateDigest] = {}
    for event in events:
        if isinstance(event, StateRestored):
            found = {step: digest for step, digest in found.items() if step <= event.step}
        elif isinstance(event, StateDigest):
            found[event.step] = event
    return dict(sorted(found.items()))


def environment(events: Iterable[Event]) -> dict[str, str]:
    """What the last bits of a result depend on besides settings, data and code, by name; empty if not recorded."""
    reported = [event for event in events if isinstance(event, WorkerEnvironment)]
    found = {name: sorted({str(getattr(event, name)) for event in reported}) for name in ("device", "torch", "threads")}
    return {name: " / ".join(values) for name, values in found.items() if values}
