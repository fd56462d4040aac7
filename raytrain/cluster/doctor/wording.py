"""How does a row name nodes? The same way in all of them, and shortly where there are many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MOST = 3


def listed(names: Iterable[str], most: int = MOST) -> str:
    """'a, b, c and 4 more'."""
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def told(findings: Mapping[str, str], most: int = MOST) -> str:
    """'a, b: not there; c: too small': what was found, with the nodes where it was."""
    grouped: dict[str, list[str]] = {}
    for name, finding in findings.items():
        grouped.setdefault(finding, []).append(name)
    parts = [f"{listed(names)}: {finding}" for finding, names in grouped.items()]
    return "; ".join(parts[:most]) + (f"; and {len(parts) - most} more" if len(parts) > most else "")


def on_all(count: int) -> str:
    """'on the only node', 'on all 4 nodes'."""
    return "on the only node" if count == 1 else f"on all {count} nodes"
