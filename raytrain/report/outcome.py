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
from raytrain.report.facts import facts_of
from raytrain.rundir import EVENTS, RunDir


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
    facts = facts_of(run_dir)
    try:
        events = list(read(run_dir))
    except OSError as error:
        rule, fix = "holds what the run wrote", "mend what is named above"
        raise StorageError(run_dir.child(EVENTS), str(error), rule, fix) from None
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
