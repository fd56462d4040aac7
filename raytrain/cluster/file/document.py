"""A YAML file that a person wrote: what is in it, and in which line? And what a mistake in it is. Pure.

What is looked up may have any type or be missing, so the readers here give an empty value instead: that something has the
wrong type is said once, by the check of the schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from raytrain.cluster.file.facts import Facts

KEYS = ("str", "merge")
"""YAML's tags of what a key is: a text, or '<<'."""

Place = tuple[str | int, ...]
"""Keys and indexes from the top of the file."""


@dataclass(frozen=True, order=True)
class Mistake:
    """Something in a file that would not work, or not as meant.

    Args:
        line: counts from 1.
        where: what stands there, like max_workers.
        value: what was found.
        rule: what would have been right.
        fix: what to do now.
    """

    line: int
    where: str
    value: str
    rule: str
    fix: str

    def text(self, name: str) -> str:
        """For people; `name` is the file's."""
        return f"{name}:{self.line}: {self.where}\n  value: {self.value}\n  rule:  {self.rule}\n  fix:   {self.fix}"


@dataclass(frozen=True)
class Document:
    """One document of a YAML file.

    Args:
        data: its content, of any type; keys that are no texts are made texts.
        lines: of each key and item, by its place.
        twice: keys that stand twice in the same mapping: their place, and the line of the second.
        odd: keys that are no texts.
        facts: about the machine, the run and the versions.
    """

    data: Any
    lines: Mapping[Place, int]
    twice: tuple[tuple[Place, int], ...]
    odd: tuple[Place, ...]
    facts: Facts

    def line(self, *place: str | int) -> int:
        """The line of a place, or else of the nearest one around it that the file has."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines[place]

    def get(self, *place: str | int) -> Any:
        """What stands there, None if there is nothing."""
        found = self.data
        for step in place:
            if isinstance(found, dict):
                found = found.get(step)
            elif isinstance(found, list) and isinstance(step, int) and step < len(found):
                found = found[step]
            else:
                return None
        return found

    def mapping(self, *place: str | int) -> dict[str, Any]:
        """The mapping there, or an empty one."""
        found = self.get(*place)
        return found if isinstance(found, dict) else {}

    def items(self, *place: str | int) -> list[Any]:
        """The list there, or an empty one."""
        found = self.get(*place)
        return found if isinstance(found, list) else []

    def number(self, *place: str | int, default: int = 0) -> int:
        """The whole number there, or the default."""
        found = self.get(*place)
        return found if isinstance(found, int) and not isinstance(found, bool) else default

    def text(self, *place: str | int) -> str:
        """The text there, or an empty one."""
        found = self.get(*place)
        return found if isinstance(found, str) else ""

    def mistake(self, place: Place, value: object, rule: str, fix: str) -> Mistake:
        """A mistake at a place."""
        return Mistake(self.line(*place), name_of(place), shown(value), rule, fix)

    @property
    def provider(self) -> str:
        return self.text("provider", "type")


def name_of(place: Place) -> str:
    """('setup_commands', 2) -> 'setup_commands[2]'."""
    return re.sub(r"\.\[", "[", ".".join(f"[{step}]" if isinstance(step, int) else step for step in place)) or "the file"


def shown(value: object) -> str:
    """A value on one line, not too long."""
    text = " ".join(("not given" if value is None else str(value)).split()) or "empty"
    return text if len(text) <= 100 else text[:97] + "..."


def read(text: str, facts: Facts) -> tuple[list[Document], list[Mistake]]:
    """The documents of a file; none, and a mistake, where it is not YAML."""
    try:
        nodes, data = list(yaml.compose_all(text, Loader=yaml.SafeLoader)), list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        return [], [_syntax(error)]
    documents = [_document(node, each, facts) for node, each in zip(nodes, data, strict=True) if each is not None]
    empty = Mistake(1, "the file", "empty", "describes a cluster", "write one with raytrain cluster render")
    return documents, [] if documents else [empty]


def _syntax(error: yaml.YAMLError) -> Mistake:
    marks = [getattr(error, "problem_mark", None), getattr(error, "context_mark", None)]
    if getattr(error, "context", None) == "while scanning a simple key":  # noticed only on the line after it
        marks.reverse()
    mark = marks[0] or marks[1]
    problem = getattr(error, "problem", None) or str(error)
    fix = "look at this line and the one before it: indentation, colons, quotes, brackets"
    return Mistake(mark.line + 1 if mark else 1, "the file", problem, "is YAML", fix)


def _document(node: yaml.Node, data: Any, facts: Facts) -> Document:
    lines: dict[Place, int] = {(): node.start_mark.line + 1}
    twice: list[tuple[Place, int]] = []
    odd: list[Place] = []
    for place, here in _places(node, ()):
        if place in lines and not any(place[: len(other)] == other for other, _ in twice):
            twice.append((place, here.start_mark.line + 1))
        if here.tag.rpartition(":")[2] not in KEYS and isinstance(place[-1], str):
            odd.append(place)
        lines[place] = here.start_mark.line + 1
    return Document(_with_text_keys(data), lines, tuple(twice), tuple(odd), facts)


def _places(node: yaml.Node, place: Place) -> Iterator[tuple[Place, yaml.Node]]:
    """All places below a node, with the node of the key or the item."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*place, str(key.value))
            yield here, key
            yield from _places(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*place, index), value
            yield from _places(value, (*place, index))


def _with_text_keys(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _with_text_keys(value) for key, value in data.items()}
    return [_with_text_keys(value) for value in data] if isinstance(data, list) else data
