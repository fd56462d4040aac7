"""How does a tree of values become YAML that a person likes to read? With comments, which PyYAML cannot write.

A key or an item that begins with "# " is a comment. What is short and flat stands on one line, a `Folded` text on
several. Pure; the values' own text comes from PyYAML, so that it is quoted where it must be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

LONGEST_FLOW = 100
INDENT = "  "


class Folded(str):
    """A shell command, written on several lines: each newline is a space to whoever reads the YAML."""

    __slots__ = ()


def to_yaml(tree: dict[str, Any]) -> str:
    """The text of one document."""
    return "\n".join(_mapping(tree)) + "\n"


def _mapping(tree: dict[str, Any]) -> Iterator[str]:
    for key, value in tree.items():
        if key.startswith("# "):
            yield from key.splitlines()
        else:
            yield from _after(f"{_flow(key)}:", value)


def _items(values: list[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str) and value.startswith("# "):
            yield from value.splitlines()
        elif isinstance(value, dict) and not _is_flat(value):
            first, *rest = _mapping(value)
            yield f"- {first}"
            yield from (INDENT + line for line in rest)
        else:
            yield from _after("-", value)


def _after(start: str, value: Any) -> Iterator[str]:
    if isinstance(value, Folded):
        yield f"{start} >-"
        yield from (INDENT + line for line in value.splitlines())
    elif _is_flat(value):
        yield f"{start} {_flow(value)}"
    else:
        yield start
        yield from (INDENT + line for line in (_mapping(value) if isinstance(value, dict) else _items(value)))


def _is_flat(value: Any) -> bool:
    inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    if any(isinstance(each, (dict, list, Folded)) or str(each).startswith("# ") for each in inside):
        return False
    return not inside or (len(_flow(value)) <= LONGEST_FLOW and not any(" " in str(each) for each in inside))


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("...\n").strip()
