"""What is the one-line message of an event? Also the small formatters that messages share.

Single steps have no message, and output lines are shown as they are. Pure functions, used by all viewers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raytrain.events import kinds
from raytrain.units import format_bytes, format_count, format_seconds


def describe(event: kinds.Event) -> str | None:
    """One line without control characters, or None for an event without a message."""
    message = _MESSAGES.get(event.kind)
    return clean(message(event)) if message else None


def clean(text: str) -> str:
    """The text as one printable line: control characters become spaces, terminal escapes and trailing space are removed.

    Keeps only what follows the last carriage return, because progress bars redraw their line.
    """
    last = text.rstrip("\r\n").rpartition("\r")[2]
    return "".join(c if c.isprintable() else " " for c in _without_escapes(last)).rstrip()


def format_number(value: float) -> str:
    """Four significant digits: 0.12346 -> '0.1235', 12345.6 -> '1.235e+04'."""
    return f"{value:.4g}"


def format_metrics(metrics: Mapping[str, float]) -> str:
    """'valid/loss 0.1235, valid/accuracy 0.975'."""
    return ", ".join(f"{name} {format_number(value)}" for name, value in metrics.items())


def format_logical(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


def count_of(count: int, noun: str, plural: str = "") -> str:
    """(1, 'worker') -> '1 worker', (2, 'loss', 'losses') -> '2 losses'."""
    return f"{format_count(count)} {noun if count == 1 else plural or noun + 's'}"


def _without_escapes(text: str) -> str:
    """Removes terminal control sequences (ECMA-48: ESC [ parameters, then a final byte from @ to ~)."""
    first, *rest = text.split("\x1b[")
    return first + "".join(part.lstrip("0123456789;:?<=>!\"#$%&'()*+,-./ ")[1:] for part in rest)


def _started(event: kinds.RunStarted) -> str:
    size = f", {format_count(event.num_parameters)} parameters" if event.num_parameters is not None else ""
    threads = f", {count_of(event.threads, 'thread')} per worker" if event.threads is not None else ""
    return (
        f"run {event.name}: {count_of(event.num_steps, 'step')}, {count_of(event.steps_per_epoch, 'step')} and "
        f"{count_of(event.rows_per_epoch, 'row')} per epoch, global batch {event.global_batch}{size}{threads}"
        + _readers(event)
    )


def _readers(event: kinds.RunStarted) -> str:
    """What reads the rows of each source, said once where it is the same for all."""
    readers = {how: [name for name, other in event.readers.items() if other == how] for how in event.readers.values()}
    names = {how: "" if len(readers) == 1 else " of " + ", ".join(sources) for how, sources in readers.items()}
    return "".join(f"; rows{names[how]} are read by {how}" for how in readers)


def _restored(event: kinds.StateRestored) -> str:
    if not event.checkpoint:
        return "initial weights, step 0"
    damaged = "".join(f"; {name} cannot be used: {reason}" for name, reason in event.damaged.items())
    return f"resumed from step {event.step} ({event.checkpoint}){damaged}"


def _formed(event: kinds.GenerationFormed) -> str:
    causes = {cause: f"after a {cause}" for cause in ("loss", "join", "drain")} | {"retry": "again, though nobody was lost"}
    text = f"generation {event.generation}: {count_of(len(event.members), 'worker')} from step {event.step}"
    pause = f", pause {format_seconds(event.pause_s)}" if event.pause_s else ""
    return f"{text} {causes[event.cause]}{pause}" if event.cause in causes else f"{text}{pause}"


def _evaluated(event: kinds.EvaluationDone) -> str:
    best = "best, " if event.is_best else ""
    took = f"{count_of(event.rows, 'row')}, {format_seconds(event.seconds)}"
    return f"step {event.step}: {format_metrics(event.metrics)} ({best}{took})"


def _saved(event: kinds.CheckpointSaved) -> str:
    took = f"{format_bytes(event.size_bytes)} in {format_seconds(event.seconds)}"
    return f"saved {event.checkpoint}: {took}, pause {format_seconds(event.stall_s)}"


def _ended(event: kinds.RunEnded) -> str:
    return f"{event.outcome} at step {event.step}" + (f": {event.message}" if event.message else "")


_MESSAGES: dict[str, Callable[[Any], str]] = {
    kinds.RunStarted.kind: _started,
    kinds.StateRestored.kind: _restored,
    kinds.GenerationFormed.kind: _formed,
    kinds.WorkerStarting.kind: lambda e: f"worker {e.worker} is starting on {e.node} (process {e.pid})",
    kinds.WorkerLost.kind: lambda e: f"lost worker {e.worker} on {e.node} (process {e.pid}): {e.reason}",
    kinds.WorkerDraining.kind: lambda e: f"draining worker {e.worker} after its step: {e.reason or e.node + ' drains'}",
    kinds.WorkerDrained.kind: lambda e: f"drained worker {e.worker} on {e.node}",
    kinds.FaultInjected.kind: lambda e: f"injected fault: {e.fault} {e.target}",
    kinds.WaitingForWorkers.kind: lambda e: f"waiting: {e.have} of at least {count_of(e.need, 'worker')}: {e.reason}",
    kinds.StepSkipped.kind: lambda e: (
        f"step {e.step} skipped: loss or gradient not finite (loss {e.loss}), weights unchanged"
    ),
    kinds.EvaluationDone.kind: _evaluated,
    kinds.CheckpointSaved.kind: _saved,
    kinds.CheckpointFailed.kind: lambda e: f"checkpoint of step {e.step} failed: {e.reason}",
    kinds.RunEnded.kind: _ended,
}
