"""YAML with lines and comments: values as Ray reads them, the line of each, and text that reads as the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain.cluster.file.document import Document, facts_of_this_machine, read, to_yaml
from tests.unit.cluster.file.support import facts

TEXT = """\
# A comment.
name: a
types:
  head: {resources: {CPU: 0}}
commands:
  - one
  - >-
    two
    three
name: b
base: &base {x: 1}
derived:
  <<: *base
  y: &yes true
  z: *yes
  yes: !!str 5
"""
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=12).filter(
    lambda text: not text.startswith("# ")
)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXTS | st.sampled_from(["yes", "0", "1e3", "n", "1:30"])
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))


@pytest.fixture
def document() -> Document:
    (document,), wrong = read(TEXT, facts())
    assert wrong == []
    return document


def test_each_value_has_its_line_and_a_missing_one_that_of_its_parent(document: Document) -> None:
    paths = [
        *("types", "types.head.resources.CPU", "commands.1", "derived.y", "types.head.max_workers", "derived.x"),
        "nothing.at",
    ]
    steps = [[int(step) if step.isdigit() else step for step in path.split(".")] for path in paths]
    assert [document.line(*path) for path in steps] == [3, 4, 7, 14, 4, 12, 2]


def test_duplicate_keys_are_known_and_the_last_counts(document: Document) -> None:
    assert (document.duplicates, document.line("name"), document.text("name")) == ([("name",)], 10, "b")
    (flow,), _ = read("a: {x: {q: 1}, y: {q: 2, q: 3}}\n", facts())
    assert flow.duplicates == [("a", "y", "q")]


def test_keys_that_are_not_strings_become_strings_and_are_known() -> None:
    (document,), _ = read("a: {1: x}\nyes: y\nn: z\n", facts())
    assert document.data == {"a": {"1": "x"}, "True": "y", "n": "z"}
    assert document.other_keys == [("a", "1"), ("True",)]


@pytest.mark.parametrize("value", ["yes", "010", "1:30", "1e3", "1.5e3", "1.5e+3", "n", "~", "0x1F", "2024-01-01", "'0'"])
def test_values_are_what_pyyaml_reads_since_ray_uses_it(value: str) -> None:
    (document,), _ = read(f"a: {value}\nb: {value}\n", facts())
    assert repr(document.data) == repr(yaml.safe_load(f"a: {value}\nb: {value}\n"))


def test_content_is_in_plain_types(document: Document) -> None:
    assert document.data == {**yaml.safe_load(TEXT), "derived": {"x": 1, "y": True, "z": True, "True": "5"}}
    kinds = {type(document.data), type(document.get("commands")), type(document.get("commands", 1))}
    assert kinds | {type(document.get("derived", "z"))} == {dict, list, str, bool}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        *(("a: 1\nb\nc: 2\n", 2), ("a:\n  - x\n y: 2\n", 3), ('a: 1\nb: "open\nc: 2\n', 4), ("a: 1\n\tb: 2\n", 2)),
        *(("a: {b: 1\nc: 2\n", 2), ("a: 1\nb: *nowhere\n", 2), ("a: !!python/name:os.system x\n", 1)),
        *(("a: 2024-99-99\n", 1), ("a: !!int ''\n", 1), ("- " * 500, 1)),
    ],
)
def test_what_is_not_yaml_is_one_mistake_with_its_line(text: str, line: int) -> None:
    documents, (mistake,) = read(text, facts())
    assert documents == []
    assert (mistake.where, mistake.rule, mistake.line) == ("the file", "is YAML", line)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null\n"])
def test_an_empty_file_is_a_mistake(text: str) -> None:
    documents, wrong = read(text, facts())
    assert (documents, [each.value for each in wrong]) == ([], ["empty"])


def test_documents_keep_the_lines_of_the_file() -> None:
    (first, second, third), wrong = read("a: 1\n---\n# x\nb: 2\n---\nwords\n", facts())
    assert (wrong, first.line("a"), second.line("b"), third.line()) == ([], 1, 4, 6)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4))
def test_any_tree_that_is_written_reads_as_the_same_values(tree: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(tree)) == tree


def test_relative_paths_start_where_ray_up_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("home/key", "data/x"):
        (tmp_path / name).mkdir(parents=True)
    exists = facts_of_this_machine(tmp_path).exists
    assert [exists(path) for path in ("data", "~/key", str(tmp_path))] == [True] * 3
    assert not any(map(exists, ("nope", "~/nope", "/nope", "~nobody-of-this-name/x", "x" * 5000, "a\0b")))


def test_facts_include_rays_schema_defaults_and_version(tmp_path: Path) -> None:
    facts = facts_of_this_machine(tmp_path, (1, 4))
    assert (facts.ray, facts.workers, facts.defaults["aws"]["max_workers"]) == (ray.__version__, (1, 4), 2)
    assert "available_node_types" in facts.schema["properties"]
    assert {"aws", "gcp", "azure", "local"} <= facts.defaults.keys()
