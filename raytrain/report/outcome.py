"""What did a run come to? Its settings, losses, digests and checkpoint files, read from its directory for a comparison.

What was done and then undone, because training went on from an older checkpoint, is left out. Nothing is judged here.
Reads, in any process, also while the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raytrain.checkpoint.store import CheckpointStore
from raytrain.errors import StorageError
from raytrain.events.curve import curve
from raytrain.events.kinds import ConditionsTold, Event, StateDigest, StateRestored
from raytrain.events.log import read
from raytrain.rundir import EVENTS, RUN, RunDir


@dataclass(frozen=True)
class Outcome:
    """What is known of a run.

    Args:
        directory: the run's directory.
        facts: the content of run.json.
        losses: global loss by step, which counts from 0.
        digests: by finished steps.
        files: SHA-256 of each file of each checkpoint that is still there, by finished steps, then by name.
        conditions: device, version of torch and threads of the workers; several values where they differed.
    """

    directory: str
    facts: Mapping[str, Any]
    losses: Mapping[int, float] = field(default_factory=dict)
    digests: Mapping[int, StateDigest] = field(default_factory=dict)
    files: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    conditions: Mapping[str, str] = field(default_factory=dict)


def outcome_of(run_dir: RunDir) -> Outcome:
    """Reads a run's directory; O(steps + digests) memory.

    Raises:
        StorageError: there is no run, or it cannot be read.
    """
    facts = _facts(run_dir)
    try:
        events = list(read(run_dir))
    except OSError as error:
        raise _unreadable(run_dir.child(EVENTS), str(error)) from None
    return Outcome(
        run_dir.path,
        facts,
        {step: record.loss for step, record in curve(events).items()},
        digests(events),
        {
            checkpoint.step: {name: entry.sha256 for name, entry in checkpoint.manifest.files.items()}
            for checkpoint in CheckpointStore(run_dir).list()
        },
        conditions(events),
    )


def digests(events: Iterable[Event]) -> dict[int, StateDigest]:
    """The digests that count, by finished steps: of each step the newest one, and none that was undone afterwards."""
    found: dict[int, StateDigest] = {}
    for event in events:
        if isinstance(event, StateRestored):
            found = {step: digest for step, digest in found.items() if step <= event.step}
        elif isinstance(event, StateDigest):
            found[event.step] = event
    return dict(sorted(found.items()))


def conditions(events: Iterable[Event]) -> dict[str, str]:
    """What the last bits depend on besides settings, data and code, by name; empty if no worker has told it."""
    told = [event for event in events if isinstance(event, ConditionsTold)]
    found = {name: sorted({str(getattr(event, name)) for event in told}) for name in ("device", "torch", "threads")}
    return {name: " / ".join(values) for name, values in found.items() if values}


def _facts(run_dir: RunDir) -> dict[str, Any]:
    try:
        facts = run_dir.read_json(RUN)
    except (FileNotFoundError, NotADirectoryError):
        rule, fix = f"a run's directory holds {RUN}", "give the directory of a run: its storage, then its name"
        raise StorageError(run_dir.path, f"no {RUN}", rule, fix) from None
    except ValueError as error:
        raise _unreadable(run_dir.child(RUN), f"not JSON: {error}") from None
    except OSError as error:
        raise _unreadable(run_dir.child(RUN), str(error)) from None
    if not isinstance(facts, dict) or not isinstance(facts.get("plan"), dict):
        raise _unreadable(run_dir.child(RUN), "no plan")
    return facts


def _unreadable(path: str, found: str) -> StorageError:
    return StorageError(path, found, "holds what the run wrote", "bring back the file that the run wrote, or run again")
