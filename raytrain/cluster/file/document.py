"""How is a YAML file read so that each value keeps its line, and written so that it keeps its comments?

Uses ruamel.yaml with YAML 1.1, as Ray reads it (`yes` is a boolean). A `Document` gives an empty value where a value is
missing or has another type: the schema check reports a wrong type, once. `facts_of_this_machine` is the only function here
that looks at this machine; the checks get its result and stay pure.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq, TaggedScalar
from ruamel.yaml.constructor import RoundTripConstructor, SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.scalarbool import ScalarBoolean
from ruamel.yaml.scalarstring import FoldedScalarString

DIRECTIVE = "%YAML 1.1\n---\n"
LONGEST_FLOW = 100
PYYAML_STRINGS = re.compile(r"[yYnN]|[-+]?[\d_]+(?:[eE][-+]?|\.[\d_]*[eE])\d+")
"""What PyYAML, with which Ray reads the file, takes for a string, and YAML 1.1 does not."""

KeyPath = tuple[str | int, ...]
"""Keys and indexes from the top of the file."""


@dataclass(frozen=True)
class Facts:
    """What the checks know besides the file.

    Args:
        exists: whether a path, as the file writes it, exists on this machine.
        ray: version of Ray that is installed here; all nodes need the same one.
        schema: Ray's JSON schema of a cluster file.
        defaults: what Ray uses where the file says nothing, by provider.
        workers: smallest and largest number of workers of the run, if known.
    """

    exists: Callable[[str], bool]
    ray: str
    schema: Mapping[str, Any]
    defaults: Mapping[str, Mapping[str, Any]]
    workers: tuple[int, int] | None = None


def facts_of_this_machine(directory: Path, workers: tuple[int, int] | None = None) -> Facts:
    """Looks at this machine and at the Ray that is installed here; `directory` is where `ray up` will run."""
    import ray
    import ray.autoscaler

    home, reader = Path(ray.autoscaler.__file__).parent, YAML(typ="safe", pure=True)
    files = {kind: home / kind / "defaults.yaml" for kind in ("aws", "gcp", "azure", "local", "aliyun", "vsphere")}
    return Facts(
        exists=partial(_exists, directory),
        ray=ray.__version__,
        schema=json.loads((home / "ray-schema.json").read_text(encoding="utf-8")),
        defaults={kind: reader.load(file) for kind, file in files.items() if file.exists()},
        workers=workers,
    )


def _exists(directory: Path, path: str) -> bool:
    try:
        return (directory / Path(path).expanduser()).exists()
    except (OSError, RuntimeError, ValueError):  # too long, an unknown user, not a path
        return False


@dataclass(frozen=True, order=True)
class Mistake:
    """Something in a file that would not work, or not as intended, in four parts; `line` counts from 1."""

    line: int
    where: str
    value: str
    rule: str
    fix: str

    def text(self, name: str) -> str:
        """For people; `name` is the name of the file."""
        return f"{name}:{self.line}: {self.where}\n  value: {self.value}\n  rule:  {self.rule}\n  fix:   {self.fix}"


@dataclass(frozen=True)
class Document:
    """One document of a YAML file.

    Args:
        data: its content in plain types; keys that are not strings are converted to strings.
        marks: line and column of each key and item, by path.
        duplicates: keys that occur again in the same mapping; their marks are those of the last.
        other_keys: keys that are not strings.
        facts: about the machine, the run and the versions.
    """

    data: Any
    marks: Mapping[KeyPath, tuple[int, int]]
    duplicates: Sequence[KeyPath]
    other_keys: Sequence[KeyPath]
    facts: Facts

    def line(self, *path: str | int) -> int:
        """The line of a path, or of the nearest parent that the file has."""
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks[path][0]

    def get(self, *path: str | int) -> Any:
        """The value at a path, None if there is none."""
        found = self.data
        for step in path:
            if isinstance(found, dict):
                found = found.get(step)
            elif isinstance(found, list) and isinstance(step, int) and step < len(found):
                found = found[step]
            else:
                return None
        return found

    def mapping(self, *path: str | int) -> dict[str, Any]:
        """The mapping at a path, or an empty one."""
        found = self.get(*path)
        return found if isinstance(found, dict) else {}

    def items(self, *path: str | int) -> list[Any]:
        """The list at a path, or an empty one."""
        found = self.get(*path)
        return found if isinstance(found, list) else []

    def number(self, *path: str | int, default: int = 0) -> int:
        """The integer at a path, or the default."""
        found = self.get(*path)
        return found if isinstance(found, int) and not isinstance(found, bool) else default

    def text(self, *path: str | int) -> str:
        """The string at a path, or an empty one."""
        found = self.get(*path)
        return found if isinstance(found, str) else ""

    def mistake(self, path: KeyPath, value: object, rule: str, fix: str) -> Mistake:
        """A mistake at a path."""
        return Mistake(self.line(*path), name_of(path), shown(value), rule, fix)

    @property
    def provider(self) -> str:
        return self.text("provider", "type")

    @property
    def provider_defaults(self) -> Mapping[str, Any]:
        """What Ray uses where the file says nothing."""
        return self.facts.defaults.get(self.provider, {})


def name_of(path: KeyPath) -> str:
    """('setup_commands', 2) -> 'setup_commands[2]'."""
    return re.sub(r"\.\[", "[", ".".join(f"[{step}]" if isinstance(step, int) else step for step in path)) or "the file"


def shown(value: object) -> str:
    """A value on one line of at most 100 characters."""
    text = " ".join(("not given" if value is None else str(value)).split()) or "empty"
    return text if len(text) <= 100 else text[:97] + "..."


class _Constructor(RoundTripConstructor):
    """Notes where documents start and which keys are duplicates, keeping the last as PyYAML does; refuses unknown tags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.starts: list[int] = []
        self.duplicates: set[tuple[str, int, int]] = set()

    def construct_document(self, node: Any) -> Any:
        self.starts.append(node.start_mark.line + 1)
        return super().construct_document(node)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        is_string = isinstance(node, ScalarNode) and PYYAML_STRINGS.fullmatch(node.value)
        return node.value if is_string else super().construct_object(node, deep)

    def check_mapping_key(self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any) -> bool:
        if key in mapping:
            self.duplicates.add((str(key), key_node.start_mark.line + 1, key_node.start_mark.column))
        return True


_Constructor.add_constructor(None, SafeConstructor.construct_undefined)


def read(text: str, facts: Facts) -> tuple[list[Document], list[Mistake]]:
    """The documents of a file; none, and one mistake, where it is empty or not YAML."""
    reader, documents = YAML(), []
    reader.Constructor, reader.version = _Constructor, (1, 1)
    try:
        for node, start in zip(list(reader.load_all(text)), reader.constructor.starts, strict=True):
            marks: dict[KeyPath, tuple[int, int]] = {(): (start, 0)}
            other_keys: list[KeyPath] = []
            data = _plain(node, (), marks, other_keys)
            duplicates = [path for path, mark in marks.items() if (*path[-1:], *mark) in reader.constructor.duplicates]
            documents += [Document(data, marks, duplicates, other_keys, facts)] if data is not None else []
    except (YAMLError, ValueError, LookupError, RecursionError) as error:
        return [], [_syntax(error)]
    empty = Mistake(1, "the file", "empty", "describes a cluster", "write one with raytrain cluster render")
    return documents, [] if documents else [empty]


def _syntax(error: Exception) -> Mistake:
    marks = [getattr(error, "problem_mark", None), getattr(error, "context_mark", None)]
    if getattr(error, "context", None) == "while scanning a simple key":  # noticed only on the line after it
        marks.reverse()
    mark = marks[0] or marks[1]
    problem = getattr(error, "problem", None) or str(error)
    fix = "look at this line and the one before it: indentation, colons, quotes, brackets"
    return Mistake(mark.line + 1 if mark else 1, "the file", shown(problem), "is YAML", fix)


def _plain(node: Any, path: KeyPath, marks: dict[KeyPath, tuple[int, int]], other_keys: list[KeyPath]) -> Any:
    """The value of a node in plain types; adds the marks of all that is in it."""
    if isinstance(node, (CommentedMap, CommentedSeq)):
        is_map, own = isinstance(node, CommentedMap), node.lc.data or {}
        plain: dict[Any, Any] = {}
        for key, value in node.items() if isinstance(node, CommentedMap) else enumerate(node):
            here: KeyPath = (*path, str(key) if is_map else key)
            if is_map and not isinstance(key, str):
                other_keys.append(here)
            if key in own:  # keys that come from a merge (<<) have no line of their own
                marks[here] = (own[key][0] + 1, own[key][1])
            plain[here[-1]] = _plain(value, here, marks, other_keys)
        return plain if is_map else list(plain.values())
    if isinstance(node, ScalarBoolean):
        return bool(node)
    return str(node) if isinstance(node, str) else node.value if isinstance(node, TaggedScalar) else node


def to_yaml(tree: Mapping[str, Any], header: str = "") -> str:
    """The text of one document, below a header of comment lines; a key that begins with '# ' is a comment."""
    writer, text = YAML(), io.StringIO()
    writer.version, writer.width = (1, 1), 10**6
    writer.indent(mapping=2, sequence=4, offset=2)
    writer.dump(_commented(tree, 0), text)
    return header + text.getvalue().removeprefix(DIRECTIVE)


def folded(lines: Sequence[str]) -> FoldedScalarString:
    """A shell command that YAML writes on several lines; each newline reads as a space."""
    text: FoldedScalarString = FoldedScalarString(" ".join(lines))
    text.fold_pos = [end - 1 for end in accumulate(len(line) + 1 for line in lines)][:-1]  # type: ignore[attr-defined]
    return text


def _commented(value: Any, indent: int) -> Any:
    if isinstance(value, Mapping):
        mapping, comment = CommentedMap(), ""
        for key, inner in value.items():
            if key.startswith("# "):
                comment = key.replace("\n# ", "\n").removeprefix("# ")
                continue
            mapping[key] = _commented(inner, indent + 2)
            if comment:
                mapping.yaml_set_comment_before_after_key(key, before=comment, indent=indent)
                comment = ""
        return _styled(mapping, [*value, *value.values()])
    if isinstance(value, list):
        return _styled(CommentedSeq(_commented(inner, indent + 2) for inner in value), value)
    return value


def _styled(node: Any, inner: Sequence[Any]) -> Any:
    """Writes what is short and flat on one line."""
    words = [str(each) for each in inner if not isinstance(each, (dict, list))]
    is_flat = len(words) == len(inner) and not any(" " in word for word in words)
    if is_flat and sum(len(word) + 2 for word in words) <= LONGEST_FLOW:
        node.fa.set_flow_style()
    return node
