"""A file as a document: its values, whatever their types, and the lines where they stand."""

from __future__ import annotations

import pytest

from raytrain.cluster.file.document import Document, name_of, read, shown
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
  y: true
"""


@pytest.fixture
def document() -> Document:
    (document,), wrong = read(TEXT, facts())
    assert wrong == []
    return document


def test_lines_of_keys_and_items(document: Document) -> None:
    assert document.line("types") == 3
    assert document.line("types", "head", "resources", "CPU") == 4
    assert document.line("commands", 1) == 7
    assert document.line("derived", "y") == 14


def test_what_is_not_there_is_on_the_line_of_what_is_around_it(document: Document) -> None:
    assert document.line("types", "head", "max_workers") == 4
    assert document.line("derived", "x") == 12
    assert document.line("nothing", "at", "all") == 2


def test_keys_that_stand_twice_are_known(document: Document) -> None:
    assert document.twice == ((("name",), 10),)
    assert document.text("name") == "b"


def test_other_types_read_as_empty(document: Document) -> None:
    assert document.mapping("name") == {}
    assert document.items("types") == []
    assert document.text("types") == ""
    assert document.number("derived", "y", default=7) == 7
    assert document.number("derived", "x") == 1
    assert document.get("commands", 9) is None
    assert document.get("name", "deeper") is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb\nc: 2\n", 2),
        ("a:\n  - x\n y: 2\n", 3),
        ('a: 1\nb: "open\nc: 2\n', 4),
        ("a: 1\n\tb: 2\n", 2),
        ("a: {b: 1\nc: 2\n", 2),
        ("a: 1\nb: *nowhere\n", 2),
        ("a: !!python/name:os.system x\n", 1),
    ],
)
def test_what_is_not_yaml_is_one_mistake_with_its_line(text: str, line: int) -> None:
    documents, (mistake,) = read(text, facts())
    assert documents == []
    assert (mistake.where, mistake.rule, mistake.line) == ("the file", "is YAML", line)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null\n"])
def test_nothing_is_a_mistake(text: str) -> None:
    documents, wrong = read(text, facts())
    assert documents == []
    assert [each.value for each in wrong] == ["empty"]


def test_documents_keep_the_lines_of_the_file() -> None:
    (first, second), wrong = read("a: 1\n---\n# x\nb: 2\n", facts())
    assert (wrong, first.line("a"), second.line("b")) == ([], 1, 4)


def test_names_and_values_as_people_read_them() -> None:
    assert name_of(()) == "the file"
    assert name_of(("a", "b", 2, "c", 0)) == "a.b[2].c[0]"
    assert shown(None) == "not given"
    assert shown("a\n  b") == "a b"
    assert shown("") == "empty"
    assert len(shown("x" * 500)) == 100
