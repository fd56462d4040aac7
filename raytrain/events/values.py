"""An event as plain values, as they stand in a line of `events.jsonl`, and back."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from raytrain.events.kinds import KINDS, Event, GenerationFormed, Member, RunStarted


def to_json(event: Event) -> dict[str, Any]:
    """The event as plain values, with its kind first."""
    return {"kind": event.kind, **asdict(event)}


def from_json(value: dict[str, Any]) -> Event | None:
    """The event, or None for a kind or shape that this version does not know."""
    cls = KINDS.get(value.get("kind", ""))
    if cls is None:
        return None
    names = {part.name for part in fields(cls)}
    values = {key: item for key, item in value.items() if key in names}
    if cls is GenerationFormed:
        values["members"] = [Member(**member) for member in values["members"]]
    if cls is RunStarted:
        values["workers"] = tuple(values["workers"])
    try:
        return cls(**values)
    except TypeError:
        return None
